/* The producer's handle. Its list of queues is under the publish lock (P). */
#ifndef SHMQ_PRODUCER_H
#define SHMQ_PRODUCER_H

#include "memory/handles.h"

struct shmq_producer {
	shmq_broker *b;
	shmq_topic_desc *t;
	uint32_t topic, generation;
	/* Read and written under P only, so threads may share a producer. */
	uint64_t version;
	uint32_t attached_as; /* the client generation that has noted the queues */
	bool listed;
	shmq_map **maps;            /* channels first, then the backlog */
	uint32_t channels, backlog; /* counts; backlog: 0 or 1 */
	shmq_map *lacking;          /* the queue that had no room; a reference */
	uint64_t lacking_n;         /* messages that its limits did not allow; 0: memory lacked */
	uint64_t lacking_bytes;
	bool sealed; /* what it publishes is sealed */
};

/* Take the publish lock (P), check that the topic is alive, and bring the list of its queues up to
 * date. targets: the queues to publish into. */
int producer_lock(shmq_producer *p, int64_t until, shmq_map ***targets, uint32_t *count);
/* Note the queue that shmq_producer_wait waits for. n: the messages of `bytes` in all that its limits
 * are to allow; 0: it has no limits. */
void note_lacking(shmq_producer *p, shmq_map *map, uint32_t n, uint64_t bytes);
/* Check that n bodies may be published, and fill in their lengths. large: one of them has SHMQ_LARGE
 * bytes or more. */
int check_bodies(shmq_producer *p, const shmq_body *bodies, uint32_t n, uint64_t *lengths,
                 bool *large);
/* Check that n blocks of properties may be published beside the bodies, fill in their lengths, and
 * add those to the lengths of the bodies. */
int check_properties(const shmq_producer *p, const shmq_body *properties, uint32_t n,
                     uint64_t *lengths, uint32_t *blocks);
/* Check the due time: as for nsqd's DPUB, not later than a requeue may be. */
int check_due(const shmq_producer *p, int64_t due);
#endif
