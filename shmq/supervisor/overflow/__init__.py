"""Moves messages between memory and disk, and backlogs to their channels.

A single loop does all of it, so the files need no lock. Each round looks at the headers of all
watched queues at once (numpy) and then moves a bounded batch for every queue that needs something,
so that no queue starves another.

A queue is watched from the moment somebody requests it (a publisher at the high-water mark or
without room, a consumer at the low-water mark, or a client that empties, unpauses or returns
messages) until it needs nothing any more. Of the other queues a few are looked at every second, in
case a request was lost. So thousands of idle queues cost nothing.

Messages are delivered in this order: requeue ring, disk, ready ring. Each move keeps it. Numbers
are publish order, the ready ring holds 8 messages:

    first overflow       ring []       disk []         ready [1 2 3 4 5 6 7 8]
    keep the oldest      ring [1 2]    disk []         ready [3 4 5 6 7 8]
    spill                ring [1 2]    disk [3 4]      ready [5 6 7 8]
    restore              ring [1 2 3]  disk [4]        ready [5 6 7 8]

* Spill: a queue whose ready ring is 3/4 full, or whose publisher waits for room, until the ring is
  half empty. At the first overflow the oldest quarter moves to the requeue ring within memory, so
  that consumers continue without a read from disk. A queue that its consumers empty fast is left
  alone, because one message on disk sends all later ones through the disk too.
* Restore: a queue with messages on disk and few in its requeue ring, before its consumers need
  them. Restores come before spills. If consumers take messages faster than the disk gives them, all
  that fits is read at once, and a message is spilled for every two that are read. So publishers get
  half of the consumers' pace until the disk is empty, and then work in memory again with consumers
  that are as fast as they are. Otherwise all messages of a producer that never pauses would go
  through the disk, at the pace of the supervisor. If a publisher needs the room of messages that
  were read back and nobody takes them, lowering the read position undoes it.
* Relieve: requeued messages that nobody takes, if they leave a publisher of deferred messages no
  room (see `Mover.relieve`).
* Deferred messages: written beyond half of the slots that may be held, and read back in time
  (`deferred`).
* Backlogs: moved to the channels of unpaused topics that have any.

If the disk refuses (it is full, or there is an I/O error), the batch returns to its place in
memory, `health` tells so, and the write is tried again every second. Nothing is lost; publishers
wait or get Full. Reads and the removal of files that were read continue: they make room on a full
disk.

* `spiller`: the loop
* `policy`: chooses the queues, and how much to move
* `mover`, `prepend`, `deferred`: move messages between memory and disk
* `files`: which files are open, read to the end or not yet synced
* `state`, `health`: what the loop knows of each queue, and of the disk
"""
