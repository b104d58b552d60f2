/* Rebuilding a queue's derived state, with its publish lock (P) and deliver lock (D) held. */
#ifndef SHMQ_REBUILD_H
#define SHMQ_REBUILD_H

#include "memory/handles.h"

/* The error for a queue that is garbage again after a repair: some process overwrites it. */
int queue_corrupt(const shmq_map *map);
/* Rebuild a queue. P and D are held, or the segment is not READY yet. SHMQ_CORRUPT: there is
 * nothing to rebuild it from; it stays dirty. */
int queue_rebuild(shmq_broker *b, shmq_map *map, bool adopting);
/* Give back the pages of a closed queue but its header and sessions, and the slots and bodies that
 * some process can still read. D is held, and P was after the queue was closed. */
void queue_discard(shmq_map *map);
/* Returns true if every slot is in a ring, a heap or a hand, and the counts agree. P and D are
 * held. */
bool adds_up(shmq_map *map);

#endif
