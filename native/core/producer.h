/* The steps of a publish over all queues of a topic. Under the publish lock (P). */
#ifndef SHMQ_PRODUCER_H
#define SHMQ_PRODUCER_H

#include "handles.h"

struct shmq_producer {
	shmq_broker *b;
	shmq_topic_desc *t;
	uint32_t topic, generation;
	/* Read and written under P only, so threads may share a producer. */
	uint64_t version;
	uint32_t attached_as; /* the entries' `touched` belongs to it */
	bool listed;
	shmq_map **maps; /* channels first, then the backlog */
	uint32_t channels, backlog; /* counts; backlog: 0 or 1 */
	shmq_map *lacking;          /* the queue that had no room; a reference */
};

/* Targets that a publish leaves out: ephemeral ones without room. One bit each. */
#define SKIP_WORDS (SHMQ_QUEUES / 64)
#define SKIP(skip, k) ((skip)[(k) / 64] |= UINT64_C(1) << (k) % 64)
#define SKIPPED(skip, k) ((skip)[(k) / 64] >> (k) % 64 & 1)

/* Take P, check that the topic is alive, bring the list of its queues up to date; targets: where to
 * publish. */
int producer_lock(shmq_producer *p, int64_t until, shmq_map ***targets, uint32_t *count);
/* Returns true if this went into a backlog that is being moved to the channels; the spiller is
 * marked. */
bool fanout_pumps(shmq_producer *p, shmq_map **targets);
void note_lacking(shmq_producer *p, shmq_map *map);
uint64_t message_id(const shmq_broker *b, uint64_t clock);
/* Take n consecutive values of the id clock; they are stored before the commit. Returns the
 * first. */
uint64_t fanout_clock(shmq_topic_desc *t, uint32_t n, int64_t now);
/* Flip a queue's PREPARED slots and move the tail once. */
void fanout_flip(shmq_broker *b, shmq_map *map, const uint32_t *slots, uint32_t first, uint32_t n,
                 int64_t due, uint64_t bytes);
/* Returns true if the spiller has work now that the last n messages are in the queue; the queue
 * is marked for it. Ring its doorbell after P is released. */
bool fanout_overflows(shmq_broker *b, shmq_map *map, uint32_t n, bool deferred);
void fanout_prepare(shmq_slot_desc *s, uint64_t id, uint64_t seq, int64_t now, int64_t due,
                    uint64_t length);
/* The free ring named one slot twice, or was overwritten: give up. The next locker of P frees
 * the prepared slots, as after a death. */
int fanout_abort(shmq_topic_desc *t);
int check_bodies(shmq_producer *p, const shmq_body *bodies, uint32_t n, uint64_t *lengths,
                 bool *large);
/* Check the due time: as for nsqd's DPUB, not later than a requeue may be. */
int check_due(const shmq_producer *p, int64_t due);
void fanout_skip_none(uint64_t *skip, uint32_t count);
/* Make room in every target; an ephemeral one without room is marked in `skip`. */
int fanout_room(shmq_producer *p, shmq_map **targets, uint32_t count, const uint64_t *lengths,
                uint32_t n, bool deferred, int64_t until, uint64_t *skip);

#endif
