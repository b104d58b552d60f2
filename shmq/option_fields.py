"""Every option of the broker, declared once: name, unit, default, bounds, help.

The command line, the configuration file and the keywords of `shmq.Broker` are three ways to fill
`Options` (options.py), all derived from the fields below. Options that nsqd has too have its names,
units and defaults (`nsqd/options.go`, `apps/nsqd/options.go`). The exceptions are defaults of nsqd
that are not safe (`nsqd_default`), which only `shmq serve --nsqd` uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from shmq import _native
from shmq.host_defaults import default_gateway_workers, default_node_id, host_name
from shmq.option_types import Kind, declare
from shmq.shm import default_instance

_CONSTANTS: Final = _native.CONSTANTS

#: Largest number of slots of a queue, of bytes of its bodies, and of topics.
MAX_SLOTS: Final = _CONSTANTS["SLOTS_MAX"]
MAX_ARENA: Final = _CONSTANTS["ARENA_MAX"]
MAX_TOPICS: Final = _CONSTANTS["TOPICS"]

#: Messages that a queue can always hold, even with mem_queue_size = 0.
TRANSIT: Final = _CONSTANTS["TRANSIT"]

_MAX_INT32 = (1 << 31) - 1
_MAX_DURATION = float(1 << 33)  # ns still fit int64


# Each declares an option under a heading of the manual; `declare` says which arguments they take.
_broker = partial(declare, "broker")
_memory = partial(declare, "memory")
_delivery = partial(declare, "delivery")
_disk = partial(declare, "disk")
_scan = partial(declare, "scan")
_log = partial(declare, "log")
_gateway = partial(declare, "gateway")


@dataclass(frozen=True)
class OptionFields:
    """The options as fields, in the order of the manual. `Options` checks their values."""

    instance: str = _broker(
        default_instance,
        Kind.TEXT,
        "name of the broker on this host; clients find it by this",
        nsqd=False,
        env="SHMQ_INSTANCE",
    )
    data_path: str = _broker(
        "",
        Kind.TEXT,
        "existing directory for messages that do not fit in memory (empty: the current directory)",
    )
    data_path_shared: bool = _broker(
        False,
        Kind.SWITCH,
        "take files of other users, and files that others may write, in the data path; whoever "
        "made them can put messages into every channel",
        nsqd=False,
    )
    node_id: int = _broker(
        default_node_id,
        Kind.COUNT,
        "unique part of message ids",
        bounds=(0, (1 << _CONSTANTS["ID_NODE_BITS"]) - 1),
        key="id",
        default_words="from the host name",
    )
    group: str = _broker(
        "",
        Kind.TEXT,
        "name or number of a group whose members may attach too (empty: only this user); they can "
        "then run code as this user and as everybody who attaches",
        nsqd=False,
    )
    mode: int = _broker(
        0,
        Kind.MODE,
        "permissions of the shared memory, octal (0: 0600, with --group 0660)",
        bounds=(0, 0o666),
        nsqd=False,
    )
    topics: tuple[str, ...] = _broker(
        (),
        Kind.SETTINGS,
        "settings of the topics whose name matches, 'PATTERN: KEY=VALUE ...', as of `shmq topic "
        "set` (may be given several times)",
        nsqd=False,
    )
    channels: tuple[str, ...] = _broker(
        (),
        Kind.SETTINGS,
        "settings of the channels whose TOPIC or TOPIC/CHANNEL matches, 'PATTERN: KEY=VALUE ...', "
        "as of `shmq channel set` (may be given several times)",
        nsqd=False,
    )
    on_stop: str = _broker(
        "flush",
        Kind.WORD,
        "at SIGTERM: flush everything to disk, or keep it in shared memory for the next supervisor",
        choices=("flush", "keep"),
        nsqd=False,
    )

    mem_queue_size: int = _memory(
        10000,
        Kind.COUNT,
        "messages to keep in memory per topic and per channel, at least "
        f"{TRANSIT}, beside those that were read back from disk or are held (in-flight-slots). "
        "0: a message that waits is on disk until it is finished",
        bounds=(0, MAX_SLOTS - TRANSIT),
    )
    in_flight_slots: int = _memory(
        16384,
        Kind.COUNT,
        "messages per channel that may be in flight, requeued or deferred in memory",
        bounds=(16, MAX_SLOTS - TRANSIT),
        nsqd=False,
    )
    arena_size: int = _memory(
        64 << 20,
        Kind.BYTES,
        "bytes of message bodies in memory per topic and per channel, at most; if not given, more "
        "where max_msg_size needs it",
        bounds=(64 << 10, MAX_ARENA),
        nsqd=False,
    )
    max_msg_size: int = _memory(
        1 << 20,
        Kind.BYTES,
        "largest message body; must fit 3/4 of arena_size",
        bounds=(1, _MAX_INT32 - 30),
    )
    max_body_size: int = _memory(
        5 << 20,
        Kind.BYTES,
        "largest body of one command (MPUB, IDENTIFY, AUTH)",
        bounds=(1, _MAX_INT32),
        reload=True,
    )
    history_bytes: int = _memory(
        4 << 20,
        Kind.BYTES,
        "bytes for the history and the log of deaths, at most (0: neither is kept)",
        bounds=(0, 1 << 30),
        nsqd=False,
    )
    max_topics: int = _memory(
        MAX_TOPICS,
        Kind.COUNT,
        "largest number of topics; a request for one more is refused",
        bounds=(1, MAX_TOPICS),
        nsqd=False,
    )

    msg_timeout: float = _delivery(
        60.0,
        Kind.DURATION,
        "time a consumer has to finish a message before it is handed out again",
        bounds=(0.001, _MAX_DURATION),
    )
    max_msg_timeout: float = _delivery(
        900.0,
        Kind.DURATION,
        "longest message timeout a consumer may ask for, touches included",
        bounds=(0.001, _MAX_DURATION),
    )
    max_req_timeout: float = _delivery(
        3600.0,
        Kind.DURATION,
        "longest delay of a requeued or deferred message",
        bounds=(0.0, _MAX_DURATION),
    )

    max_bytes_per_file: int = _disk(
        100 << 20,
        Kind.BYTES,
        "bytes per file on disk before the next one is begun",
        bounds=(1, (1 << 40) - 1),
    )
    sync_every: int = _disk(2500, Kind.COUNT, "messages per fsync", bounds=(1, 1 << 62))
    sync_timeout: float = _disk(
        2.0, Kind.DURATION, "time between fsyncs", bounds=(0.001, _MAX_DURATION)
    )

    queue_scan_interval: float = _scan(
        0.1,
        Kind.DURATION,
        "time between two scans for timed out and due messages",
        bounds=(0.001, 3600.0),
        nsqd=False,
    )
    queue_scan_refresh_interval: float = _scan(
        5.0,
        Kind.DURATION,
        "time between two refreshes of the list of channels and the number of workers",
        bounds=(0.001, 3600.0),
        nsqd=False,
    )
    queue_scan_selection_count: int = _scan(
        20, Kind.COUNT, "channels to check at random in each interval", bounds=(1, 1 << 20)
    )
    queue_scan_worker_pool_max: int = _scan(
        4, Kind.COUNT, "largest number of scan workers", bounds=(1, 256)
    )
    queue_scan_dirty_percent: int = _scan(
        25,
        Kind.COUNT,
        "percentage of channels with something to do that makes the scan repeat at once",
        bounds=(0, 100),
        nsqd=False,
    )

    log_level: str = _log(
        "info",
        Kind.WORD,
        "lowest level that is logged",
        choices=("debug", "info", "warn", "error", "fatal"),
        reload=True,
    )
    log_format: str = _log(
        "text",
        Kind.WORD,
        "lines as nsqd writes them, or one JSON object per line",
        choices=("text", "json"),
        nsqd=False,
    )
    log_prefix: str = _log("[nsqd] ", Kind.TEXT, "beginning of every line of the log (text)")
    audit_log: str = _log(
        "stderr",
        Kind.TEXT,
        "destination of the lines about creations, deletions, emptying, pauses, configuration and "
        "failed logins: stderr (with the log, at every level), or a file (empty: nowhere)",
        nsqd=False,
    )
    audit_publish: float = _log(
        0.0,
        Kind.DURATION,
        "time between two lines of the audit log about what each client of the gateway published "
        "to each topic (0: none)",
        bounds=(0.0, 86400.0),
        nsqd=False,
    )

    gateway_workers: int = _gateway(
        default_gateway_workers,
        Kind.COUNT,
        "processes that serve clients on TCP and HTTP",
        bounds=(1, 64),
        nsqd=False,
        default_words="one per 2 cores",
    )
    tcp_address: str = _gateway(
        "127.0.0.1:4150",
        Kind.TEXT,
        "<addr>:<port> or path of a Unix socket for TCP clients (empty: none)",
        nsqd_default="0.0.0.0:4150",
    )
    http_address: str = _gateway(
        "127.0.0.1:4151",
        Kind.TEXT,
        "<addr>:<port> or path of a Unix socket for HTTP clients (empty: none)",
        nsqd_default="0.0.0.0:4151",
    )
    socket_mode: int = _gateway(
        0,
        Kind.MODE,
        "permissions of the gateway's Unix sockets, octal; who may write one may connect (0: 0600, "
        "with --socket-group 0660)",
        bounds=(0, 0o777),
        nsqd=False,
    )
    socket_group: str = _gateway(
        "",
        Kind.TEXT,
        "name or number of a group whose members may connect to the gateway's Unix sockets (empty: "
        "only this user)",
        nsqd=False,
    )
    https_address: str = _gateway(
        "127.0.0.1:4152",
        Kind.TEXT,
        "<addr>:<port> for HTTPS clients; used only with a certificate (empty: none)",
        nsqd_default="0.0.0.0:4152",
    )
    access_file: str = _gateway(
        "",
        Kind.TEXT,
        "TOML file with the users of TCP and HTTP, their secrets, and what each may do (empty: "
        "none)",
        nsqd=False,
        reload=True,
    )
    http_writes: bool = _gateway(
        True,
        Kind.SWITCH,
        "answer HTTP requests that publish, create, delete, empty or pause",
        nsqd=False,
        reload=True,
    )
    http_config: str = _gateway(
        "true",
        Kind.WORD,
        "what PUT /config may change: everything that nsqd allows, only log_level, or nothing",
        choices=("true", "log_level", "false"),
        nsqd=False,
        reload=True,
    )
    http_debug: str = _gateway(
        "loopback",
        Kind.WORD,
        "who may use /debug: processes of this host, everybody, or nobody",
        choices=("loopback", "true", "false"),
        nsqd=False,
        reload=True,
    )
    http_token_file: str = _gateway(
        "",
        Kind.TEXT,
        "file with one bearer token per line; HTTP requests that write, configure or debug need "
        "one of them (empty: that of SHMQ_HTTP_TOKEN, if it is set)",
        nsqd=False,
        reload=True,
    )
    http_open_reads: bool = _gateway(
        True,
        Kind.SWITCH,
        "whether HTTP requests that only read need no token (/ping never does)",
        nsqd=False,
        reload=True,
    )
    http_allowed_hosts: tuple[str, ...] = _gateway(
        (),
        Kind.TEXTS,
        "a further name that browsers and proxies may use for this server on HTTP; *: any (may be "
        "given several times)",
        nsqd=False,
        reload=True,
    )
    broadcast_address: str = _gateway(
        host_name,
        Kind.TEXT,
        "address that is announced to nsqlookupd",
        default_words="the host name",
    )
    broadcast_tcp_port: int = _gateway(
        0,
        Kind.COUNT,
        "TCP port that is announced to nsqlookupd (0: the one listened on)",
        bounds=(0, 65535),
    )
    broadcast_http_port: int = _gateway(
        0,
        Kind.COUNT,
        "HTTP port that is announced to nsqlookupd (0: the one listened on)",
        bounds=(0, 65535),
    )
    lookupd_tcp_address: tuple[str, ...] = _gateway(
        (),
        Kind.TEXTS,
        "an nsqlookupd's TCP address (may be given several times)",
        key="nsqlookupd_tcp_addresses",
        reload=True,
    )
    auth_http_address: tuple[str, ...] = _gateway(
        (),
        Kind.TEXTS,
        "an authorisation server's <addr>:<port> or URL (may be given several times)",
        key="auth_http_addresses",
        reload=True,
    )
    auth_http_request_method: str = _gateway(
        "get",
        Kind.WORD,
        "HTTP method for authorisation servers",
        choices=("get", "post"),
        reload=True,
    )
    http_client_connect_timeout: float = _gateway(
        2.0,
        Kind.DURATION,
        "longest time to connect to an authorisation server or nsqlookupd's HTTP",
        bounds=(0.001, _MAX_DURATION),
    )
    http_client_request_timeout: float = _gateway(
        5.0, Kind.DURATION, "longest time for a request to them", bounds=(0.001, _MAX_DURATION)
    )
    topology_region: str = _gateway(
        "", Kind.TEXT, "region that is announced to nsqlookupd and clients"
    )
    topology_zone: str = _gateway("", Kind.TEXT, "zone that is announced to nsqlookupd and clients")
    max_heartbeat_interval: float = _gateway(
        60.0,
        Kind.DURATION,
        "longest heartbeat interval a client may ask for",
        bounds=(0.001, _MAX_DURATION),
        reload=True,
    )
    max_rdy_count: int = _gateway(
        2500, Kind.COUNT, "highest RDY count of a client", bounds=(0, _MAX_INT32), reload=True
    )
    max_output_buffer_size: int = _gateway(
        64 << 10,
        Kind.BYTES,
        "largest output buffer a client may ask for",
        bounds=(64, _MAX_INT32),
        reload=True,
    )
    max_output_buffer_timeout: float = _gateway(
        30.0,
        Kind.DURATION,
        "longest time between two flushes to a client that it may ask for",
        bounds=(0.0, _MAX_DURATION),
        reload=True,
    )
    min_output_buffer_timeout: float = _gateway(
        0.025,
        Kind.DURATION,
        "shortest time between two flushes to a client that it may ask for",
        bounds=(0.0, _MAX_DURATION),
        reload=True,
    )
    output_buffer_timeout: float = _gateway(
        0.25,
        Kind.DURATION,
        "time between two flushes to a client that did not ask for another",
        bounds=(0.001, _MAX_DURATION),
        reload=True,
    )
    max_channel_consumers: int = _gateway(
        0,
        Kind.COUNT,
        "most consumers of a channel (0: any number)",
        bounds=(0, _MAX_INT32),
        reload=True,
    )
    max_lease_ttl: float = _gateway(
        3600.0,
        Kind.DURATION,
        "longest time without a sign of life after which a lease holder on the network loses its "
        "leases, and its grace",
        bounds=(0.001, _MAX_DURATION),
        nsqd=False,
        reload=True,
    )
    staged_ttl: float = _gateway(
        4 * 3600.0,
        Kind.DURATION,
        "time after which rows that clients have staged and not committed are removed, since the "
        "last were staged for the same commit",
        bounds=(0.001, _MAX_DURATION),
        nsqd=False,
        reload=True,
    )
    max_connections: int = _gateway(
        0,
        Kind.COUNT,
        "most connections of one gateway process, TCP and HTTP together, as far as its descriptors "
        "allow: topics and administration have a reserve (0: only that)",
        bounds=(0, _MAX_INT32),
        nsqd=False,
        reload=True,
    )
    max_connections_per_address: int = _gateway(
        0,
        Kind.COUNT,
        "most connections of one gateway process from one IP address, or from one other user by "
        "Unix sockets (0: any number)",
        bounds=(0, _MAX_INT32),
        nsqd=False,
        reload=True,
    )
    max_buffered_bytes: int = _gateway(
        1 << 30,
        Kind.BYTES,
        "bytes of unfinished commands and unread output that the TCP connections of one gateway "
        "process may hold together; beyond it the one with the most is ended",
        bounds=(1 << 20, 1 << 50),
        nsqd=False,
        reload=True,
    )
    statsd_address: str = _gateway(
        "", Kind.TEXT, "UDP <addr>:<port> of a statsd server (empty: none)"
    )
    statsd_interval: float = _gateway(
        60.0, Kind.DURATION, "time between two pushes to statsd", bounds=(1.001, _MAX_DURATION)
    )
    statsd_mem_stats: bool = _gateway(True, Kind.SWITCH, "send memory statistics to statsd")
    statsd_prefix: str = _gateway(
        "nsq.%s", Kind.TEXT, "prefix of statsd names; %s: the broadcast address and HTTP port"
    )
    statsd_udp_packet_size: int = _gateway(
        508, Kind.BYTES, "largest datagram to statsd", bounds=(64, 65507)
    )
    statsd_exclude_ephemeral: bool = _gateway(
        False, Kind.SWITCH, "send no statistics of ephemeral topics and channels to statsd"
    )
    e2e_processing_latency_percentile: tuple[float, ...] = _gateway(
        (),
        Kind.SHARES,
        "shares of messages whose time from publish to finish is shown, such as 0.99 or 1.0,0.95",
        key="e2e_processing_latency_percentiles",
    )
    e2e_processing_latency_window_time: float = _gateway(
        600.0,
        Kind.DURATION,
        "accepted as nsqd's; the time looked at is always 5 to 10 minutes",
        bounds=(0.001, _MAX_DURATION),
    )
    tls_cert: str = _gateway("", Kind.TEXT, "certificate file (PEM)", reload=True)
    tls_key: str = _gateway("", Kind.TEXT, "private key file (PEM)", reload=True)
    tls_client_auth_policy: str = _gateway(
        "",
        Kind.TEXT,
        "what client certificates must be: `require` (any) or `require-verify`",
        reload=True,
    )
    tls_root_ca_file: str = _gateway(
        "",
        Kind.TEXT,
        "certificates (PEM) that verify those of clients and authorisation servers",
        reload=True,
    )
    tls_required: str = _gateway(
        "false",
        Kind.WORD,
        "whether clients must use TLS; tcp-https: except on HTTP",
        choices=("false", "true", "tcp-https"),
        reload=True,
    )
    tls_min_version: str = _gateway(
        "tls1.2",
        Kind.WORD,
        "lowest TLS version",
        choices=("tls1.0", "tls1.1", "tls1.2", "tls1.3"),
        nsqd_default="tls1.0",
        reload=True,
    )
    deflate: bool = _gateway(True, Kind.SWITCH, "allow clients to ask for deflate", reload=True)
    max_deflate_level: int = _gateway(
        6, Kind.COUNT, "highest deflate level a client may ask for", bounds=(1, 9), reload=True
    )
    snappy: bool = _gateway(True, Kind.SWITCH, "allow clients to ask for snappy", reload=True)
    enable_experiment: tuple[str, ...] = _gateway(
        (), Kind.TEXTS, "accepted as nsqd's; there are no experiments"
    )

    verbose: bool = _log(False, Kind.SWITCH, "accepted as nsqd's; no effect")
    worker_id: bool = _log(False, Kind.SWITCH, "accepted as nsqd's; no effect (use --node-id)")

    def __post_init__(self) -> None:
        """Called when the fields are set; `Options` checks them here."""
