"""What new weights cost on their way: in bytes, and in time on either side.

Each section is a module that measures one thing and names its results.

    python -m benchmarks.weights --json
    python -m benchmarks.weights --section codec --json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from benchmarks import weights_codec, weights_joining, weights_links, weights_trainer, weights_transport
from benchmarks.report import report
from benchmarks.weight_states import Scale

SECTIONS: Mapping[str, Callable[[Scale], Mapping[str, object]]] = {
    "codec": weights_codec.measure,
    "transport": weights_transport.measure,
    "links": weights_links.measure,
    "joining": weights_joining.measure,
    "trainer": weights_trainer.measure,
}


def main() -> None:
    """Measure all sections, or those that are named, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--section", action="append", choices=sorted(SECTIONS), help="may be given more than once")
    parser.add_argument("--rounds", type=int, default=7, help="times that everything is measured in turn")
    parser.add_argument("--model-mib", type=int, default=128, help="size of the made-up model")
    parser.add_argument("--layers", type=int, default=8, help="of the model that takes real steps; 0: none does")
    parser.add_argument("--width", type=int, default=512, help="of these layers; a multiple of 16")
    arguments = parser.parse_args()
    scale = Scale(
        rounds=arguments.rounds,
        num_bytes=arguments.model_mib << 20,
        num_layers=arguments.layers,
        width=arguments.width,
    )
    results: dict[str, object] = {}
    for section in arguments.section or SECTIONS:
        results |= SECTIONS[section](scale)
    report("weights", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
