"""The supervisor: one process per instance, for all work that no client's call can do.

It creates queues, scans deadlines, spills overflow to disk, returns the messages of dead clients
and keeps the metadata. It may die at any time: clients continue with the messages in memory, and
the next supervisor adopts the segments.

* `supervisor`: the process, from start to stop
* `startup`, `adoption`, `shutdown`: how an instance begins and ends
* `registry`: the live topics and queues; `topics`: creates, deletes and replaces them
* `loops`: keeps the loops running
* `requests`, `scan`, `overflow`, `reaper`, `metadata_writer`, `watchdog`: the loops
* `workers`: keeps the gateway's processes running
* `salvage`, `directory_recovery`: save messages and names that something has overwritten
* `memory`, `trouble`, `progress`, `systemd`, `rlimits`: what several of these use
"""
