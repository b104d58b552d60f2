"""The supervisor: one process per instance, which does what must go on when nobody is calling.

It creates queues, scans deadlines, spills overflow to disk, returns what dead clients held and
keeps the metadata. It may die at any time: clients go on with what is in memory, and the next one
adopts what it finds.

* `supervisor`: the process, from start to stop
* `arbiter`: keeps the loops going
* `start`, `flush`: how it takes up an instance, how it puts it down
* `roster`: the live topics and queues
* `creator`, `scan`, `spill`, `reaper`, `ledger`: the loops
"""
