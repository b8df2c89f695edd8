"""`GaleraCluster`: three MariaDB nodes that replicate to each other, and a proxy that sends all clients to one of them.

docs/how-to/databases.md asks for such a proxy: the locks of one node do not hold on another one. It does what HAProxy
does with a health check of `wsrep_local_state` and with `on-marked-down shutdown-sessions`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pymysql

from tests.smoke.fault_proxy import FaultProxy
from tests.smoke.proc import MariadbServer, Proc, folder_of, free_port, until

KILLED = "Galera nodes killed and rejoined"
FROZEN = "Galera nodes frozen"
REPLACED = "Galera nodes replaced by empty ones"
NO_MAJORITY = "Galera without a majority"
GALERA_FAULTS = (KILLED, FROZEN, REPLACED, NO_MAJORITY)

EVICTION_SECONDS = 5.0
"""After this time the others remove a silent node (evs.suspect_timeout). Until then no node commits."""
_SYNCED = "4"
_PROVIDERS = [
    Path(folder, "libgalera_smm.so") for folder in ("/usr/lib/galera", "/usr/lib64/galera", "/usr/lib64/galera-4")
]
_JOIN_SECONDS = 90.0
_REST_SECONDS = 4.0
"""After a fault of a node, so that there is work in which the next one strikes."""
_CHECK_SECONDS = 0.2
_ANSWER_SECONDS = 1
"""For the answer to a health check. A node without one gets no clients."""


class GaleraNode:
    """One server. ``group_port`` is for the traffic of the cluster. ``peers``: the addresses of all these ports."""

    provider = next(filter(Path.exists, _PROVIDERS), None)

    def __init__(self, name: str, folder: Path, *, group_port: int, sync_wait: int) -> None:
        self.name, self.folder, self.group_port, self.port = name, folder / name, group_port, free_port()
        self.data = self.folder / "data"
        self.data.mkdir(parents=True)
        self._sync_wait, self._install_port, self._catch_up_port = sync_wait, free_port(), free_port()
        self._user = ["--user=mysql"] if os.geteuid() == 0 else []
        self._give_to_server()

    def install(self) -> None:
        """Make the tables of the server itself. Other nodes get a copy of them when they join."""
        program = str(MariadbServer.programs[0])
        options = ["--no-defaults", "--auth-root-authentication-method=normal", f"--datadir={self.data}", *self._user]
        log = Proc([program, *options], log=self.folder / "install.log")
        assert log.process.wait(60) == 0, log.text()

    def start(self, peers: list[str], *options: str) -> None:
        """Start the server, which then joins the cluster."""
        self.proc = Proc([*self._command(peers), *options], log=self.folder / "log")

    def start_again(self, peers: list[str]) -> None:
        """Start after a crash. The node reads its last commit from its files, and receives only what came later."""
        log = self.folder / "recovery.log"
        log.unlink(missing_ok=True)
        recovery = Proc([*self._command(peers), "--wsrep-recover"], log=log)
        assert recovery.process.wait(60) == 0, recovery.text()[-2000:]
        positions = re.findall(r"Recovered position:? *([\w-]+:-?\d+)", recovery.text())
        self.start(peers, *(f"--wsrep-start-position={position}" for position in positions[-1:]))

    def freeze(self) -> None:
        os.kill(self.proc.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.proc.pid, signal.SIGCONT)

    def lose_disk(self) -> None:
        shutil.rmtree(self.data)
        self.data.mkdir()
        self._give_to_server()

    @property
    def is_synced(self) -> bool:
        """Whether it belongs to the majority, and neither installs a copy nor sends one."""
        state = self.state()
        return state.get("wsrep_ready") == "ON" and state.get("wsrep_local_state") == _SYNCED

    def state(self) -> dict[str, str]:
        """Its status variables; empty without an answer."""
        with (
            contextlib.suppress(pymysql.Error, OSError),
            self.connect(read_timeout=_ANSWER_SECONDS) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("SET SESSION wsrep_sync_wait = 0")  # SHOW would wait too
            cursor.execute("SHOW STATUS LIKE 'wsrep%'")
            return {name: str(value) for name, value in cursor.fetchall()}
        return {}

    def connect(self, *, read_timeout: float | None = None, autocommit: bool = True) -> pymysql.Connection:
        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user="root",
            database="test",
            autocommit=autocommit,
            connect_timeout=_ANSWER_SECONDS,
            read_timeout=read_timeout,
            init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        )

    def _command(self, peers: list[str]) -> list[str]:
        provider_options = {
            "gmcast.listen_addr": f"tcp://127.0.0.1:{self.group_port}",
            "ist.recv_addr": f"127.0.0.1:{self._catch_up_port}",
            "gcache.size": "64M",
        }
        options = {
            "datadir": self.data,
            "socket": self.folder / "socket",
            "pid-file": self.folder / "pid",
            "port": self.port,
            "bind-address": "127.0.0.1",
            "binlog-format": "ROW",
            "innodb-autoinc-lock-mode": 2,
            "innodb-buffer-pool-size": "64M",
            "wsrep-on": "ON",
            "wsrep-provider": self.provider,
            "wsrep-provider-options": ";".join(f"{name}={value}" for name, value in provider_options.items()),
            "wsrep-cluster-name": "chaos",
            "wsrep-cluster-address": f"gcomm://{','.join(peers)}",
            "wsrep-node-name": self.name,
            "wsrep-node-address": "127.0.0.1",
            "wsrep-sst-method": "rsync",
            "wsrep-sst-receive-address": f"127.0.0.1:{self._install_port}",
            "wsrep-sync-wait": self._sync_wait,
        }
        given = [f"--{name}={value}" for name, value in options.items()]
        return [str(MariadbServer.programs[1]), "--no-defaults", "--skip-name-resolve", *given, *self._user]

    def _give_to_server(self) -> None:
        if os.geteuid() == 0:
            for path in (self.folder, self.data):
                shutil.chown(path, "mysql")


class GaleraCluster:
    """Three nodes and a proxy. ``port`` and ``url`` are the proxy's, which connects all clients to the node ``active``.

    ``sync_wait``: wsrep_sync_wait of the nodes. With 7, each statement first waits until its node has applied what was
    committed on the others.
    """

    def __init__(self, *, sync_wait: int = 7) -> None:
        self.folder = folder_of("mysql")
        self.nodes = [GaleraNode(f"n{n}", self.folder, group_port=free_port(), sync_wait=sync_wait) for n in range(3)]
        self.active = self.nodes[0]
        self._is_closed = threading.Event()
        self._taking = threading.Lock()
        self._proxy = FaultProxy(("127.0.0.1", self.active.port))
        self.port = self._proxy.port
        self.url = f"mysql+pymysql://root@127.0.0.1:{self.port}/test"
        self.moves = 0
        """How often another node became the active one."""
        try:
            self._form()
        except BaseException:
            self.clean_up()
            raise
        threading.Thread(target=self._check_health, name="health checks", daemon=True).start()

    def _form(self) -> None:
        self.active.install()
        self.active.start([], "--wsrep-new-cluster")
        self._await_members(self.nodes[:1])
        for number, node in enumerate(self.nodes[1:], 2):
            node.start(self._peers)
            self._await_members(self.nodes[:number])

    @property
    def faults(self) -> dict[str, tuple[float, Callable[[float], None]]]:
        """Faults beside `restart` and `fail_over`, with their weights. Each takes a random number from 0 to below 1."""
        return {
            KILLED: (6.0, lambda draw: self._restart(self._drawn(draw))),
            FROZEN: (6.0, self._freeze),
            REPLACED: (3.0, self._replace),
            NO_MAJORITY: (5.0, self._lose_majority),
        }

    def restart(self) -> None:
        """Kill the active node and let it join again."""
        self._restart(self.active)

    def fail_over(self) -> None:
        """Make another node the active one, as before maintenance."""
        self._move(self._others(self.active)[0])

    def await_nodes(self) -> None:
        """Wait until all three are healthy members."""
        self._await_members(self.nodes)

    def clean_up(self) -> None:
        self._is_closed.set()
        self._proxy.close()
        for node in self.nodes:
            if hasattr(node, "proc"):
                node.proc.clean_up()
        shutil.rmtree(self.folder)

    # --- faults ---------------------------------------------------------------------------------

    def _restart(self, node: GaleraNode) -> None:
        node.proc.clean_up()
        node.start_again(self._peers)
        self._recover()

    def _freeze(self, draw: float) -> None:
        """Freeze any node, for less or more time than it takes the others to remove it."""
        node = self._drawn(draw)
        node.freeze()
        time.sleep(EVICTION_SECONDS * (0.4 + 1.6 * (draw * 97 % 1)))
        node.thaw()
        self._recover()

    def _replace(self, draw: float) -> None:
        """Replace a node by an empty one. Another node sends it a full copy, and is not healthy meanwhile."""
        node = self._others(self.active)[int(draw * 2)]
        node.proc.clean_up()
        node.lose_disk()
        # If the new node joins before the others have removed the old one, the cluster may lose its majority for good.
        self._await_members(self._others(node))
        node.start(self._peers)
        self._recover()

    def _lose_majority(self, draw: float) -> None:
        """Freeze the two others. The active node refuses every statement until they are back."""
        others = self._others(self.active)
        for node in others:
            node.freeze()
        time.sleep(EVICTION_SECONDS * (1.2 + draw))
        for node in others:
            node.thaw()
        self._recover()

    def _recover(self) -> None:
        self.await_nodes()
        self._is_closed.wait(_REST_SECONDS)

    # --- the proxy ------------------------------------------------------------------------------

    def _check_health(self) -> None:
        """Replace an active node that is not healthy. If no other is healthy, it stays: so its errors are seen."""
        while not self._is_closed.wait(_CHECK_SECONDS):
            if self.active.is_synced:
                continue
            found = next((node for node in self._others(self.active) if node.is_synced), None)
            if found is not None and not self._is_closed.is_set():
                self._move(found)

    def _move(self, node: GaleraNode) -> None:
        with self._taking:
            self.active = node
            self._proxy.aim(("127.0.0.1", node.port))
            self.moves += 1

    # --- nodes ----------------------------------------------------------------------------------

    @property
    def _peers(self) -> list[str]:
        return [f"127.0.0.1:{node.group_port}" for node in self.nodes]

    def _others(self, node: GaleraNode) -> list[GaleraNode]:
        """The nodes after this one, in a ring."""
        index = self.nodes.index(node)
        return [*self.nodes[index + 1 :], *self.nodes[:index]]

    def _drawn(self, draw: float) -> GaleraNode:
        return self.nodes[int(draw * len(self.nodes))]

    def _await_members(self, nodes: list[GaleraNode]) -> None:
        """Wait until the cluster consists of these nodes, and all agree: one that thaws knows only its old view."""

        def are_members() -> bool:
            for node in nodes:
                assert node.proc.is_running, f"{node.name} has ended: {node.proc.text()[-3000:]}"
            states = [node.state() for node in nodes]
            views = {(each.get("wsrep_cluster_conf_id"), each.get("wsrep_cluster_size")) for each in states}
            is_one_view = len(views) == 1 and {size for _, size in views} == {str(len(nodes))}
            return is_one_view and all(each["wsrep_local_state"] == _SYNCED for each in states)

        names = " and ".join(node.name for node in nodes)
        until(f"{names} are members of the cluster", are_members, _JOIN_SECONDS, pause=0.1)


def missing_parts() -> list[str]:
    """The parts of a cluster that are not installed, except MariaDB itself."""
    programs = {name: shutil.which(name) is not None for name in ("wsrep_sst_rsync", "rsync")}
    return [name for name, is_there in {**programs, "galera": GaleraNode.provider is not None}.items() if not is_there]
