"""What shmq keeps on disk: overflow files, metadata and the data-path lock. Files only.

The formats are nsqd's, byte for byte, so that either program can start on the other's data path.
Of our own are `shmq.dat` and the chunks of deferred messages, which nsqd does not look at.

* `diskqueue`: the segment files of one queue and their position file (go-diskqueue)
* `deferred`: chunks of deferred messages with their due times; nsqd does not look at them
* `metadata`: `nsqd.dat` (topics, channels, pauses) and `shmq.dat` (reserve of the id clock)
* `dirlock`: one broker per data path

Nothing here is thread-safe: one thread at a time per object. The supervisor is the only user, and
the lock of `dirlock` is what makes it the only one.
"""


class StorageError(OSError):
    """A file says something impossible, or the data path cannot be used.

    Built like any OSError: `errno`, a sentence, `filename`. Plain system errors (disk full, no
    permission, too many open files) are not wrapped: they come through as the OSError they are.
    """
