"""The options of `shmq.Broker` as keywords, for type checkers and editors.

Made from option_fields.py by tests/conventions/test_keywords.py; `tools/dev tables` runs it after a
change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TypedDict


class Keywords(TypedDict, total=False):
    """Keywords of `shmq.Broker`: every option of `shmq serve` but `--instance` and `--data-path`,
    which are arguments of their own. Durations are seconds; None means the default."""

    data_path_shared: bool | None
    node_id: int | None
    group: str | os.PathLike[str] | None
    mode: int | str | None
    topics: Mapping[str, Mapping[str, object]] | list[str] | tuple[str, ...] | None
    channels: Mapping[str, Mapping[str, object]] | list[str] | tuple[str, ...] | None
    on_stop: Literal["flush", "keep"] | None
    mem_queue_size: int | None
    in_flight_slots: int | None
    arena_size: int | None
    max_msg_size: int | None
    max_body_size: int | None
    history_bytes: int | None
    max_topics: int | None
    msg_timeout: float | None
    max_msg_timeout: float | None
    max_req_timeout: float | None
    max_bytes_per_file: int | None
    sync_every: int | None
    sync_timeout: float | None
    queue_scan_interval: float | None
    queue_scan_refresh_interval: float | None
    queue_scan_selection_count: int | None
    queue_scan_worker_pool_max: int | None
    queue_scan_dirty_percent: int | None
    log_level: Literal["debug", "info", "warn", "error", "fatal"] | None
    log_format: Literal["text", "json"] | None
    log_prefix: str | os.PathLike[str] | None
    audit_log: str | os.PathLike[str] | None
    audit_publish: float | None
    gateway_workers: int | None
    tcp_address: str | os.PathLike[str] | None
    http_address: str | os.PathLike[str] | None
    socket_mode: int | str | None
    socket_group: str | os.PathLike[str] | None
    https_address: str | os.PathLike[str] | None
    access_file: str | os.PathLike[str] | None
    http_writes: bool | None
    http_config: Literal["true", "log_level", "false"] | bool | None
    http_debug: Literal["loopback", "true", "false"] | bool | None
    http_token_file: str | os.PathLike[str] | None
    http_open_reads: bool | None
    http_allowed_hosts: list[str] | tuple[str, ...] | None
    broadcast_address: str | os.PathLike[str] | None
    broadcast_tcp_port: int | None
    broadcast_http_port: int | None
    lookupd_tcp_address: list[str] | tuple[str, ...] | None
    auth_http_address: list[str] | tuple[str, ...] | None
    auth_http_request_method: Literal["get", "post"] | None
    http_client_connect_timeout: float | None
    http_client_request_timeout: float | None
    topology_region: str | os.PathLike[str] | None
    topology_zone: str | os.PathLike[str] | None
    max_heartbeat_interval: float | None
    max_rdy_count: int | None
    max_output_buffer_size: int | None
    max_output_buffer_timeout: float | None
    min_output_buffer_timeout: float | None
    output_buffer_timeout: float | None
    max_channel_consumers: int | None
    max_lease_ttl: float | None
    staged_ttl: float | None
    max_connections: int | None
    max_connections_per_address: int | None
    max_buffered_bytes: int | None
    statsd_address: str | os.PathLike[str] | None
    statsd_interval: float | None
    statsd_mem_stats: bool | None
    statsd_prefix: str | os.PathLike[str] | None
    statsd_udp_packet_size: int | None
    statsd_exclude_ephemeral: bool | None
    e2e_processing_latency_percentile: list[float] | tuple[float, ...] | None
    e2e_processing_latency_window_time: float | None
    tls_cert: str | os.PathLike[str] | None
    tls_key: str | os.PathLike[str] | None
    tls_client_auth_policy: str | os.PathLike[str] | None
    tls_root_ca_file: str | os.PathLike[str] | None
    tls_required: Literal["false", "true", "tcp-https"] | bool | None
    tls_min_version: Literal["tls1.0", "tls1.1", "tls1.2", "tls1.3"] | None
    deflate: bool | None
    max_deflate_level: int | None
    snappy: bool | None
    enable_experiment: list[str] | tuple[str, ...] | None
    verbose: bool | None
    worker_id: bool | None
