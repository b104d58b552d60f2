"""nsqd's TCP and HTTP protocols, for clients that do not use shared memory.

A gateway process is a client of the broker like any other: it publishes and takes messages for its
connections. If it dies, its connections end, its messages in flight return to their channels at
once, and the supervisor starts another process.

    protocol            bytes of the TCP protocol: frames, numbers, texts; no state
    host                the interfaces of a session: to its process and to its parts
    identify, publish, delivery    the commands of a session
    session             one client's state machine: bytes in, bytes out; no socket, no clock
    codecs              TLS, snappy and deflate below a session
    pools               threads for work that may take long, a pool for each kind
    auth                requests to authorisation servers
    control             requests between the processes of one instance
    context             shared state of a process, and its calls into the broker
    connections         the TCP connections of a process, and their limits
    delivery_waiter     the thread that waits for messages
    tcp                 sockets and timers around sessions
    nsqd_stats          the documents of /stats
    access              access rules of the HTTP interface
    http                its routes, with http_config and http_debug; http_server and http_messages
                        have what all routes need
    lookupd, statsd     the other servers that nsqd talks to
    listeners, tls      listening sockets and TLS settings; also for the supervisor's process
    worker              the process: makes the parts and connects them
"""
