"""The files of a data path: overflow, deferred messages, metadata, the lock. No shared memory.

The formats are nsqd's, byte for byte, so that either program can start on the other's data path.
Four kinds of files are shmq's own, and nsqd ignores them: `shmq.dat`, `shmq.key`, `shmq.leases` and
the chunks of deferred messages.

* `positions`, `records`: position words and the position file; one message in a segment file
* `data_path`, `data_files`: the segment files of all queues by name; those of one queue
* `diskqueue`: writes and reads the segment files of one queue (go-diskqueue)
* `diskqueue_recovery`: what they hold after a crash, another broker or damage
* `deferred`: the deferred store, chunk files of deferred messages with their due times
* `metadata`: `nsqd.dat` (topics, channels, pauses) and `shmq.dat` (reserve of the id clock)
* `key_file`: `shmq.key`, the key of the seals
* `returned_leases`: `shmq.leases`, the leases that a stop has returned
* `dirlock`: one broker per data path
* `own_files`: opens every file, and has the list of their kinds
* `remedies`: what to do about what the system refuses

Nothing here is thread-safe: an object is for one thread at a time. Only the supervisor writes, and
the lock of `dirlock` keeps it the only one.
"""


class StorageError(OSError):
    """A file has impossible contents, or the data path cannot be used.

    It is built like any OSError: `errno`, a sentence, `filename`. Plain system errors (disk full,
    no permission, too many open files) are not wrapped: they stay the OSError that they are.
    """
