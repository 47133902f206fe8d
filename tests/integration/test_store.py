"""A run whose weights go through a directory: trainer and generators have no connection to each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pipeline.weights.store.pointer import CURRENT, decode_pointer, stem
from tests.integration.harness import SCRIPTED, Run, running
from tests.integration.lives import newest_checkpoint, newest_version
from tests.integration.processes import Worker


async def test_a_run_through_a_directory_survives_the_death_of_its_trainer_and_a_file_that_is_cut_off(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    settings = (f"weights.store='{store}'", "trainer.max_steps=100000", "checkpoint.every_steps=4")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        trainer = run.start_all(generators=2)
        # The first checkpoint is there, and the weights of the last version that anyone knows of are younger.
        await run.until(lambda: newest_checkpoint(run) is not None, "a checkpoint")
        await run.until_steps(run.num_steps + 2)
        endpoints = await run.fleet.endpoints()
        trainer.kill()
        folder = store / str(endpoints and endpoints.folder)
        readable = decode_pointer((folder / CURRENT).read_bytes())
        tiles = max(folder.glob(f"{stem(readable.weight_version, readable.root)}.tiles-*"))
        tiles.write_bytes(tiles.read_bytes()[:-1])
        joiner = run.start("generator", "weights.share_on_host=false")
        await run.until(lambda: bool(joiner.events_named("weights_not_read")), "a reader that says what is wrong")
        await run.until(partial(is_counted, run, joiner), "a wrong piece that is counted")
        saved, killed_at = newest_checkpoint(run), await newest_version(run)
        assert saved is not None
        last_step = saved.step + 8
        run.start("trainer", f"trainer.max_steps={last_step}")
        await run.until_over()
        versions = {
            version
            for sample in run.samples
            for completion in sample["completions"]
            for version, _ in completion["versions"]
        }
        assert run.num_steps == last_step
        assert max(versions) > killed_at
        assert endpoints is not None
        assert (endpoints.tiles, endpoints.folder.split(".")[0]) == ("", run_name)
        assert [path.name for path in store.iterdir()] == [endpoints.folder]
        names = [path.name for path in (store / endpoints.folder).iterdir()]
        assert "current" in names
        assert len({name[:19] for name in names if name.endswith(".manifest")}) <= 3


async def is_counted(run: Run, worker: Worker) -> bool:
    return await run.metric(worker, "rollstream_weight_pieces_wrong_total", reason="corrupt") >= 1
