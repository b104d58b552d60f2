/* A batch of messages on its way to disk: marking it, and taking the locks for its end. */
#ifndef SHMQ_BATCH_H
#define SHMQ_BATCH_H

#include "memory/handles.h"
#include "shmq_supervisor.h"

typedef struct batch_wish {
	uint32_t n;         /* at most this many messages */
	uint64_t max_bytes; /* of records */
	int64_t from_due;   /* a chunk: those that are due then or later, CLOCK_REALTIME ns */
} batch_wish;

/* Mark messages under the deliver lock (D) with `mark`, which fills `out`; out->source and, for a
 * chunk, out->position are set. Again if it marked none because it met garbage, which the lock
 * repairs. */
int batch_begin(shmq_broker *b, uint32_t queue, const batch_wish *wish, int64_t until,
                int (*mark)(shmq_broker *b, shmq_map *map, const batch_wish *wish, shmq_spill *out),
                shmq_spill *out);
/* Take the locks for the end of a batch. *commit: it was written. If it is still true afterwards, D
 * is held and the batch is to be committed. If not, the publish lock (P) and D are held, because
 * giving the messages back needs a rebuild: it was not written, or `whole` says that it has been
 * emptied or repaired meanwhile. */
int batch_lock(shmq_broker *b, shmq_map *map, const shmq_spill *s, int64_t until,
               bool (*whole)(shmq_map *map, const shmq_spill *s), bool *commit);

#endif
