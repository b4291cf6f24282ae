"""Second copies of a process's state in the host memory of another node: who holds whose, their room, their transfer.

Each process runs an HTTP server for the copies of its node (`memory_folder`), and is a client of the one that holds its
second copies. A server listens on one address, that of the network on which the coordinator is reached. It answers
only to a token that the processes exchange through the coordination service, and with mutual TLS where that has it.

    POST /neighbour/PART/STEP             begin a second copy
    PUT /neighbour/PART/STEP/FILE         store a file of it, once; SHA256SUMS, sent last, completes the copy
    GET /PLACE/STEP/FILE                  read a file of a complete copy; PLACE is own/PART or neighbour/PART
    DELETE /neighbour/PART?keep=STEP,...  delete the other second copies of a part

Files are hashed while they are stored, so that the check against SHA256SUMS does not read their content again.
"""

import collections
import contextlib
import dataclasses
import hashlib
import hmac
import http.client
import http.server
import os
import queue
import re
import secrets
import shutil
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxstack.checkpoint import manifest
from jaxstack.checkpoint.memory_folder import Copies, Part, held_copies, read_part
from jaxstack.distributed.cluster import TLS_PEER_PREFIX
from jaxstack.errors import ConfigError
from jaxstack.observe.number_format import byte_size

_TARGET = re.compile(r"/(own|neighbour)/(\d{1,9}of\d{1,9})/(\d{1,9})/((?:arrays/)?[A-Za-z0-9_][A-Za-z0-9_.-]*)")
_BEGUN = re.compile(r"/neighbour/(\d{1,9}of\d{1,9})/(\d{1,9})")
_HELD = re.compile(r"/neighbour/(\d{1,9}of\d{1,9})\?keep=((?:\d{1,9}(?:,\d{1,9})*)?)")
_CHUNK_BYTES = 2**20
_CONNECTIONS = 8
"""Connections by which the files of a copy are sent at the same time; the holder hashes each with one core."""
_SECONDS = 60.0
"""Limit on the time in which nothing arrives at one end of a connection."""
_GENERATIONS = 2
"""Copies of a state that are in memory at the same time: the complete one and the one that is being written."""


def find_holders(hosts: Sequence[str]) -> list[int]:
    """Return for each process the process that holds the second copy of its state.

    That is the process at the same place on the next node; on a single node, the next process.

    Args:
      hosts: the node of each process, under any name.
    """
    names = list(dict.fromkeys(hosts))
    members = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    if len(names) == 1:
        return [(rank + 1) % len(hosts) for rank in range(len(hosts))]
    holders = []
    for rank, host in enumerate(hosts):
        others = members[names[(names.index(host) + 1) % len(names)]]
        holders.append(others[members[host].index(rank) % len(others)])
    return holders


@dataclasses.dataclass(frozen=True)
class Member:
    """A process as the others know it after the start: its node and server, the size of its shards, its copies."""

    node: str
    num_bytes: int
    free_bytes: int
    """Room in its node's host memory for copies, those that are there now included."""
    copies: Mapping[str, Sequence[int]]
    """Place of copies in its node's folder, such as `own/0of2` -> their steps; those of earlier starts too."""
    address: Sequence[Any] = ()
    """(host, port) of its server; empty without one."""
    token: str = ""


def needed_bytes(members: Sequence[Member]) -> dict[str, int]:
    """Return for each node the most bytes that copies take in its host memory: own and second ones, two of each."""
    needed = collections.Counter[str]()
    for member in members:
        needed[member.node] += _GENERATIONS * member.num_bytes
    if len(members) > 1:
        for rank, holder in enumerate(find_holders([member.node for member in members])):
            needed[members[holder].node] += _GENERATIONS * members[rank].num_bytes
    return dict(needed)


def check_room(members: Sequence[Member]) -> None:
    """Check that every node has room for the copies that its processes make and hold.

    Raises:
      ConfigError: a node has not; the message has the numbers.
    """
    for node, needed in needed_bytes(members).items():
        free = min(member.free_bytes for member in members if member.node == node)
        if needed > free:
            host, _, folder = node.partition(":")
            raise ConfigError(
                f"copies in memory (checkpoint.memory_every_steps) take up to {byte_size(needed)} in {folder} on "
                f"{host}, {_GENERATIONS} of each state that the node has or holds; it has {byte_size(free)}. Make that "
                "file system larger (mount -o remount,size=..., docker run --shm-size), shard the state over more "
                "nodes, or set checkpoint.memory_every_steps to 0."
            )


class Location(NamedTuple):
    """Place of copies of one part: the process that can read them from its node's folder, and their name there."""

    member: int
    place: str


def locate(members: Sequence[Member], step: int, count: int) -> dict[Part, list[Location]]:
    """Return where the copies of `step` are that a start with `count` processes made, own copies first."""
    found: dict[Part, dict[tuple[str, str], Location]] = {}
    for number, member in enumerate(members):
        for place, steps in member.copies.items():
            part = _part_of(place)
            if step in steps and part.count == count:
                found.setdefault(part, {}).setdefault((place, member.node), Location(number, place))
    return {
        part: sorted(places.values(), key=lambda location: not location.place.startswith("own/"))
        for part, places in sorted(found.items())
    }


def known_copies(members: Sequence[Member], count: int) -> list[tuple[int, int]]:
    """Return (step, number of processes that made them) of all copies in memory: the newest first.

    Of the same step those of `count` processes come first.
    """
    found = {
        (step, _part_of(place).count) for member in members for place, steps in member.copies.items() for step in steps
    }
    return sorted(found, key=lambda made: (-made[0], made[1] != count, made[1]))


def _part_of(place: str) -> Part:
    part = read_part(place.partition("/")[2])
    assert part is not None, place
    return part


def _tls_context(files: Sequence[str], side: int) -> ssl.SSLContext:
    """Return the context of mutual TLS with (certificate, key, CA); the names of hosts do not matter, as in jax's."""
    certificate, key, authority = files
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_peer(connection: Any) -> None:
    """Check that the other end's certificate names a URI with the run's prefix, if the run has one.

    Raises:
      ssl.SSLError: it does not.
    """
    prefix = os.environ.get(TLS_PEER_PREFIX)
    names = (connection.getpeercert() or {}).get("subjectAltName", ())
    if prefix and not any(kind == "URI" and name.startswith(prefix) for kind, name in names):
        raise ssl.SSLError(f"the certificate of the other process names no URI with the prefix {prefix}")


def _send_content(connection: socket.socket, file: BinaryIO) -> None:
    """Send a whole file; without TLS the kernel does."""
    if isinstance(connection, ssl.SSLSocket):  # its own sendfile reads 8 KiB at a time
        while chunk := file.read(_CHUNK_BYTES):
            connection.sendall(chunk)
    else:
        connection.sendfile(file)


class CopyServer:
    """Stores and returns second copies of other processes, in threads of this process.

    Args:
      folder: the node's folder of copies.
      host: address to listen on.
      tls: (certificate, key, CA) of mutual TLS; None: without.
    """

    def __init__(self, folder: Path, host: str, tls: Sequence[str] | None = None):
        self.token = secrets.token_hex(32)
        """Random secret, which a request must have in its header `Authorization`."""
        self._server = _Server(host, folder, self.token, tls)
        self.address: tuple[str, int] = (host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, folder: Path, token: str, tls: Sequence[str] | None):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.folder = folder
        self.token = token
        self.arriving: dict[Part, tuple[int, dict[str, str]]] = {}
        """Part -> step of the second copy that was begun last, and name -> SHA-256 of its files that are stored."""
        self._context = _tls_context(tls, ssl.PROTOCOL_TLS_SERVER) if tls else None
        super().__init__((host, 0), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        connection, address = self.socket.accept()
        connection.settimeout(_SECONDS)
        if self._context is not None:  # the handshake is left to the connection's own thread
            connection = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore it: a stranger, or a client whose process died, which tells its own user."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _node(self) -> _Server:
        assert isinstance(self.server, _Server)
        return self.server

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
            _check_peer(self.request)
        super().setup()

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._node.token}".encode()):
            return True
        self._refuse(401, "another token")
        return False

    def do_POST(self) -> None:
        match = _BEGUN.fullmatch(self.path)
        part = read_part(match[1]) if match is not None else None
        if match is None or part is None:
            self._refuse(400, "no second copy")
            return
        try:
            (held_copies(self._node.folder, part).begin(int(match[2])) / "arrays").mkdir()
        except OSError as error:
            self._refuse(507, f"{error.strerror or error}")
            return
        self._node.arriving[part] = int(match[2]), {}
        self._answer(b"")

    def do_PUT(self) -> None:
        match = _TARGET.fullmatch(self.path)
        length = self.headers.get("Content-Length", "")
        part = read_part(match[2]) if match is not None else None
        if match is None or part is None or match[1] != "neighbour" or not length.isdigit():
            self._refuse(400, "no file of a copy")
            return
        copies = held_copies(self._node.folder, part)
        step = int(match[3])
        begun, digests = self._node.arriving.get(part, (None, {}))
        if begun != step:
            self._refuse(409, "this copy was not begun")
            return
        try:
            digests[match[4]] = self._store(copies.staging(step) / match[4], int(length))
            if match[4] == manifest.MANIFEST:
                manifest.check(copies.staging(step), step, known=digests)
                copies.commit(step)
        except (OSError, manifest.Damaged) as error:
            self._refuse(507, f"{getattr(error, 'strerror', None) or error}")
            return
        self._answer(b"")

    def _store(self, path: Path, length: int) -> str:
        """Store a file of `length` bytes as they arrive; return their SHA-256 in hex."""
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(length, _CHUNK_BYTES)))
        with open(path, "xb") as file:  # once in a copy, so that what was hashed is not overwritten
            while length:
                chunk = buffer[: self.rfile.readinto(buffer[:length])]
                if not chunk:
                    raise OSError("the connection ended early")
                length -= len(chunk)
                digest.update(chunk)
                file.write(chunk)
        return digest.hexdigest()

    def do_GET(self) -> None:
        match = _TARGET.fullmatch(self.path)
        try:
            if match is None:
                raise FileNotFoundError
            path = Copies(self._node.folder / match[1] / match[2]).path(int(match[3])) / match[4]
            with open(path, "rb") as file:
                self.send_response(200)
                self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
                self.end_headers()
                _send_content(self.connection, file)
        except FileNotFoundError:
            self._refuse(404, "no such file")

    def do_DELETE(self) -> None:
        match = _HELD.fullmatch(self.path)
        part = read_part(match[1]) if match is not None else None
        if match is None or part is None:
            self._refuse(400, "no second copies")
            return
        kept = [int(step) for step in match[2].split(",") if step]
        held_copies(self._node.folder, part).keep(kept)
        self._answer(b"")

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, code: int, reason: str) -> None:
        self.close_connection = True  # what it was sending is not read
        self.send_error(code, reason[:200].encode("ascii", "replace").decode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _taken(waiting: queue.SimpleQueue[str]) -> Iterator[str]:
    """Take what waits in a queue, until it is empty."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield waiting.get_nowait()


class TransferError(OSError):
    """Raised if the other process does not store or return a copy; the message has its reason."""


class CopyClient:
    """Sends second copies to a process of another node, and reads the copies of that node.

    Args:
      address: (host, port) of its server.
      token: its token.
      tls: (certificate, key, CA) of mutual TLS; None: without.
    """

    def __init__(self, address: tuple[str, int], token: str, tls: Sequence[str] | None = None):
        self._address = address
        self._headers = {"Authorization": f"Bearer {token}"}
        self._context = _tls_context(tls, ssl.PROTOCOL_TLS_CLIENT) if tls else None

    @contextlib.contextmanager
    def sending(self, part: Part, root: Path, step: int) -> Iterator[Callable[[str], None]]:
        """Send the copy of `step` while the `with` block writes it to the folder `root`, which it may rename.

        Index and manifest are sent last. The copy counts for the holder once all of it is there, with the manifest's
        hashes.

        Yields:
          A function that the block calls, in any thread, with the name of each other file once it is complete.

        Raises:
          TransferError: at the end of the block: the copy could not be sent, or not be stored.
        """
        target = f"/neighbour/{part}/{step}"
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        folder = os.open(root, os.O_RDONLY)
        pool = ThreadPoolExecutor(_CONNECTIONS)
        begun = pool.submit(self._ask, "POST", target)
        sent = [begun]

        def send_waiting() -> None:
            begun.result()
            if not waiting.empty():  # otherwise another thread has taken the file
                self._send_files(target, folder, _taken(waiting))

        def add(name: str) -> None:
            waiting.put(name)
            sent.append(pool.submit(send_waiting))

        try:
            yield add
            for each in as_completed(sent):
                each.result()
            self._send_files(target, folder, [manifest.INDEX, manifest.MANIFEST])
        except BaseException:
            collections.deque(_taken(waiting), maxlen=0)  # so that threads send no further file
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            os.close(folder)

    def _send_files(self, target: str, folder: int, names: Iterable[str]) -> None:
        """Send files of the folder with the descriptor `folder` by one connection."""
        connection = self._connect()
        try:
            for name in names:
                with open(name, "rb", opener=partial(os.open, dir_fd=folder)) as file:
                    self._exchange(connection, "PUT", f"{target}/{name}", file).read()
        finally:
            connection.close()

    def fetch(self, place: str, step: int, root: Path) -> None:
        """Read a whole copy of `step` into the empty folder `root`, unchecked.

        Args:
          place: of the copies in the other node's folder, such as `own/0of2`.
          step: the step.
          root: the folder.

        Raises:
          TransferError: it could not be read.
          manifest.Damaged: its manifest is damaged, so that its files are not known.
        """
        self.fetch_files(place, step, root, (manifest.INDEX, manifest.MANIFEST))
        self.fetch_files(place, step, root, manifest.read_index(root)["files"])

    def fetch_files(self, place: str, step: int, root: Path, names: Iterable[str]) -> None:
        """Read some files of a copy into the folder `root`, unchecked.

        Raises:
          TransferError: one could not be read.
        """
        connection = self._connect()
        try:
            for name in names:
                self._read_file(connection, f"/{place}/{step}/{name}", root / name)
        finally:
            connection.close()

    def keep(self, part: Part, steps: Collection[int]) -> None:
        """Delete the holder's second copies of this part, except those of `steps`.

        Raises:
          TransferError: the holder does not answer.
        """
        self._ask("DELETE", f"/neighbour/{part}?keep={','.join(str(step) for step in steps)}")

    def _ask(self, method: str, target: str) -> None:
        connection = self._connect()
        try:
            self._exchange(connection, method, target).read()
        finally:
            connection.close()

    def _read_file(self, connection: http.client.HTTPConnection, target: str, path: Path) -> None:
        answer = self._exchange(connection, "GET", target)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "wb") as file:
                shutil.copyfileobj(answer, file, _CHUNK_BYTES)
        except http.client.HTTPException as error:
            raise TransferError(f"{target}: {error!r}") from None

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._address
        try:
            if self._context is None:
                connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
            else:
                connection = http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=self._context)
            connection.connect()
            if self._context is not None:
                _check_peer(connection.sock)
        except OSError as error:
            raise TransferError(f"{host}:{port} cannot be reached: {error.strerror or error}") from None
        return connection

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, target: str, file: BinaryIO | None = None
    ) -> http.client.HTTPResponse:
        where = "{}:{}".format(*self._address)
        length = {} if file is None else {"Content-Length": str(os.fstat(file.fileno()).st_size)}
        try:
            # A server that refuses closes the connection before it has read all; its answer has the reason.
            with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
                connection.request(method, target, headers=self._headers | length)
                if file is not None:
                    _send_content(connection.sock, file)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or repr(error)
            raise TransferError(f"{where} did not take {target}: {reason}") from None
        if answer.status != 200:
            raise TransferError(f"{where} refused {target}: {answer.reason}")
        return answer
