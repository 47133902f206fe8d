"""A whole run on this machine: its directory, its server, its worker processes.

In: settings and numbers of workers. Out: a `Supervisor` for them. `up` and `demo` are thin around
it. The settings reach the workers in one file in the run's directory; the server's address, which
may hold a password, reaches them in the environment only.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

from redis.exceptions import RedisError

from pipeline.config import Config
from pipeline.embedded import LOG_NAME, EmbeddedServer
from pipeline.errors import ConfigError, RollstreamError, ServiceUnavailableError
from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.local.autoscaler import Autoscaler
from pipeline.local.crew import TRAINER, Crew, worker_spec, worker_specs
from pipeline.local.first_contact import make_contact
from pipeline.local.scaler import Scaler
from pipeline.local.server_address import announce_server, kept_dir, with_url, withdraw_server
from pipeline.local.supervisor import RestartPolicy, Supervisor, WorkerExit, WorkerSpec
from pipeline.programs import program
from pipeline.queues.connection import connect
from pipeline.queues.ledger import Ledger
from pipeline.records.recorder import METRICS_FILE
from pipeline.scaling import Scaling
from pipeline.settings.files import show
from pipeline.streams import Streams

_KILL_GRACE_S = 15.0
_LOOK_EVERY_S = 1.0
_LAST_LOOK_S = 5.0


class LocalRun:
    """Context manager around a run. Inside it `config` has the server's real address."""

    def __init__(
        self,
        config: Config,
        crew: Crew,
        *,
        persist: bool = True,
        command: tuple[str, ...] | None = None,
    ) -> None:
        self.config = config
        self._crew = crew
        self._persist = persist
        self._command = command or program("pipeline.cli")
        self._open = ExitStack()
        self._server: EmbeddedServer | None = None

    @property
    def config_file(self) -> Path:
        """The resolved settings, without secrets."""
        return self.config.run_dir / "config.toml"

    @property
    def names(self) -> list[str]:
        """Names of the workers, in data-flow order."""
        return [spec.name for spec in self._specs()]

    def __enter__(self) -> LocalRun:
        with ExitStack() as stack:
            run_dir = self.config.run_dir
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"run.dir = {str(self.config.run.dir)!r}: {run_dir} cannot be made ({error.strerror}); "
                    "choose a folder that you may write to"
                ) from None
            _lock(stack.enter_context((run_dir / "up.lock").open("a+")), self.config)
            # As the user wrote them: the address of a private server ends with it, and workers have it from us.
            self.config_file.write_text(show(_on_one_machine(self.config)), encoding="utf-8")
            if self.config.redis.is_embedded:
                self._start_server(stack, run_dir)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def supervisor(
        self,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[WorkerExit], None] = lambda _: None,
        on_drain: Callable[[], None] = lambda: None,
        restart: RestartPolicy | None = None,
    ) -> Supervisor:
        """Ready to `run()`. Drains get a little longer than the workers give themselves."""
        return Supervisor(
            self._specs(),
            drain_timeout_s=self.config.worker.drain_timeout_s + _KILL_GRACE_S,
            on_line=on_line,
            on_exit=on_exit,
            on_drain=on_drain,
            restart=restart,
            progress=self._progress,
        )

    def _progress(self, name: str) -> object:
        """How far the run is. A trainer goes on from a checkpoint, the others where the steps are."""
        if name == TRAINER:
            return {marker.stat().st_mtime_ns for marker in self.config.run_dir.glob("checkpoints/step_*/COMPLETE")}
        records = self.config.run_dir / METRICS_FILE
        return records.stat().st_mtime_ns if records.exists() else None

    async def run(self, supervisor: Supervisor, say: Callable[[str], None]) -> int:
        """Run until the supervisor ends, or the private server does. Returns the exit code.

        Raises ServiceUnavailableError or RunConflictError before any worker is started.
        """
        await make_contact(self.config)
        helpers = [
            asyncio.create_task(work) for work in (self._watch_server(supervisor, say), self._scale(supervisor, say))
        ]
        try:
            code = await supervisor.run()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)
        if code == 0 and self._persist:
            await self._say_if_it_is_not_over(say)
        return code

    async def _say_if_it_is_not_over(self, say: Callable[[str], None]) -> None:
        """Workers that were asked to leave end well, too; who waits for the run should know which it was."""
        try:
            async with asyncio.timeout(_LAST_LOOK_S), connect(self.config.redis, retries=0) as redis:
                facts = await Fleet(redis, Keys(self.config.run.name)).facts()
        except (RedisError, OSError, RollstreamError):
            return
        if facts.stop_reason is None and facts.weight_version is not None:
            say(
                f"drained before the run was over, at weight version {facts.weight_version}; the same command goes on "
                "from there"
            )

    async def _scale(self, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        """Carry out what `rollstream scale`, or the autoscaler, asks for."""

        def spec_of(role: str, index: int, number: int) -> WorkerSpec:
            crew = self._crew.with_number(role, number)
            return worker_spec(role, index, self.config, crew, self._command, self.config_file, os.environ)

        numbers = self._crew.numbers(self.config)
        keys, scaler = Keys(self.config.run.name), Scaler(supervisor, numbers, spec_of, say)
        async with connect(self.config.redis, retries=0) as redis:
            scaling = Scaling(redis, keys)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(scaler.run(scaling))
                    if self.config.autoscale.enabled:
                        autoscaler = Autoscaler(self.config, lambda: scaler.numbers, say)
                        group.create_task(autoscaler.run(redis, keys, scaling))
            except* RollstreamError as errors:
                say(f"the numbers of workers stay as they are: {errors.exceptions[0]}")

    async def ledger(self) -> Ledger | None:
        """Where all groups of the run are; None where its server does not say."""
        async with connect(self.config.redis, retries=0) as redis:
            try:
                return await Streams(redis, Keys(self.config.run.name), self.config.queues, consumer="up").ledger()
            except (RedisError, OSError):
                return None

    async def _watch_server(self, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        """Nothing goes on without the server, and only this process could have started another."""
        while self._server is not None:
            await asyncio.sleep(_LOOK_EVERY_S)
            if not self._server.has_ended():
                continue
            log = kept_dir(self.config) / LOG_NAME
            kept = f"; what it had written is kept, start the run again; why is in {log}" if self._persist else ""
            say(f"the private server of this run has ended{kept}")
            supervisor.stop(ServiceUnavailableError.exit_code)
            return

    def _specs(self) -> list[WorkerSpec]:
        return worker_specs(self.config, self._crew, self._command, self.config_file, os.environ)

    def _start_server(self, stack: ExitStack, run_dir: Path) -> None:
        try:
            server = EmbeddedServer.start(kept_dir(self.config) if self._persist else None, persist=self._persist)
        except ConfigError as error:
            raise ConfigError(f"run.dir = {str(self.config.run.dir)!r}: {error}") from None
        self._server = server
        stack.callback(server.stop)
        announce_server(run_dir, server.url)
        stack.callback(withdraw_server, run_dir)
        self.config = with_url(self.config, server.url)


@contextmanager
def kept_server(config: Config) -> Iterator[Config]:
    """A server on what an `up` of this run has kept, for the time of the block; yields settings with its address.

    Raises ConfigError while an `up` is at work.
    """
    with alone_in(config), EmbeddedServer.start(kept_dir(config), persist=True) as server:
        yield with_url(config, server.url)


@contextmanager
def alone_in(config: Config) -> Iterator[None]:
    """No `up` works in the run's directory in the block. Raises ConfigError while one does."""
    with (config.run_dir / "up.lock").open("a+") as lock:
        _lock(lock, config)
        yield


def _on_one_machine(config: Config) -> Config:
    """Lines that are merged are for people, and no two workers want the same port."""
    changes: dict[str, object] = {"port": 0}
    if config.worker.log_format == "auto":
        changes["log_format"] = "console"
    return config.model_copy(update={"worker": config.worker.model_copy(update=changes)})


def _lock(file: IO[str], config: Config) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"run.name = {config.run.name!r}: another `up` of this run is at work in {config.run_dir}, or a command "
            "that looks at what it has kept; stop it, or choose another name with --run"
        ) from None
