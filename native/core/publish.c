/*
 * Publishing: reserve, commit, fan out.
 *
 *   1 room     under P, for every queue: the next n free slots exist and own bodies big enough.
 *              No head has moved; a death or a refusal leaves free slots with bodies.
 *   2 prepare  fields and body, then PREPARED(seq); heads move when every queue is done.
 *   3 commit   topic.committed = last seq. One store decides for all queues and the whole batch.
 *   4 flip     READY or DEFERRED, ring entries, each tail once.
 * A death before 3 makes every PREPARED slot FREE, a death after it READY (rebuild.c). The seqs of the
 * dead batch are given again only after that, because every P locker repairs first.
 */
#include "atomics.h"
#include "clock.h"
#include "doorbell.h"
#include "handles.h"
#include "killpoint.h"
#include "loan.h"
#include "locking.h"
#include "mapping.h"
#include "plant.h"
#include "producer.h"
#include "shmq.h"
#include "slots.h"
#include "status.h"
#include "writer.h"

#include <stdlib.h>
#include <string.h>

static int publish_small(shmq_producer *p, const shmq_body *bodies, const uint64_t *lengths,
                         uint32_t n, int64_t due, const shmq_mark *mark, int64_t until,
                         uint64_t *first_id)
{
	shmq_broker *b = p->b;
	shmq_topic_desc *t = p->t;
	shmq_writer_desc *writer = NULL;
	shmq_map **targets;
	uint64_t skip[SKIP_WORDS], seq, clock, bytes = 0;
	uint32_t count, wake = 0;
	shmq_map *few[16];
	bool ring = false;
	int64_t now;
	int r = producer_lock(p, until, &targets, &count);

	if (r)
		return r;
	fanout_skip_none(skip, count);
	if (mark)
		r = writer_begin(b, p->topic, mark, &writer);
	if (!r)
		r = fanout_room(p, targets, count, lengths, n, due != 0, until, skip);
	if (r) {
		topic_unlock(t);
		return r;
	}
	now = realtime_ns();
	clock = fanout_clock(t, n, now);
	seq = ld(&t->committed) + 1;
	for (uint32_t i = 0; i < n; i++)
		bytes += lengths[i];
	for (uint32_t k = 0; k < count; k++) {
		if (SKIPPED(skip, k))
			continue;
		for (uint32_t i = 0; i < n; i++) {
			uint8_t *body;
			shmq_slot_desc *s = free_slot_for(targets[k], i, lengths[i], &body);

			if (!s)
				return fanout_abort(t);
			memcpy(body, bodies[i].data, lengths[i]);
			fanout_prepare(s, message_id(b, clock + i), seq + i, now, due, lengths[i]);
		}
	}
	for (uint32_t k = 0; k < count; k++)
		if (!SKIPPED(skip, k)) {
			st_release(&targets[k]->q->free_head, ld(&targets[k]->q->free_head) + n);
			SHMQ_KILLPOINT("publish.head");
		}
	if (writer)
		writer_prepare(writer, mark, seq + n - 1);
	if (!SHMQ_PLANTED(2))
		st_release(&t->committed, seq + n - 1);
	SHMQ_KILLPOINT("publish.committed");
	for (uint32_t k = 0; k < count; k++) {
		shmq_map *map = targets[k];

		if (SKIPPED(skip, k))
			bump(&map->q->dropped, n);
		else
			fanout_flip(b, map, NULL, ld(&map->q->free_head) - n, n, due, bytes);
	}
	if (SHMQ_PLANTED(2))
		st_release(&t->committed, seq + n - 1);
	if (writer)
		writer_commit(writer);
	bump(&t->messages, n);
	bump(&t->bytes, bytes);
	/* Queues with waiters are remembered and held, because the system calls come after P. */
	fence_full();
	for (uint32_t k = 0; k < count; k++) {
		ring |= fanout_overflows(b, targets[k], n, due != 0);
		if (due || !ld(&targets[k]->q->takers.summary))
			continue;
		if (wake < 16) {
			map_hold(targets[k]);
			few[wake++] = targets[k];
		} else {
			wake_takers(b, targets[k], n);
		}
	}
	ring |= fanout_pumps(p, targets);
	topic_unlock(t);
	for (uint32_t k = 0; k < wake; k++) {
		wake_takers(b, few[k], n);
		map_release(few[k]);
	}
	if (ring)
		supervisor_ring(b, RING_SPILLER);
	*first_id = message_id(b, clock);
	return 0;
}

/* Publish large bodies: loan them, copy outside the lock, commit them together. */
static int publish_large(shmq_producer *p, const shmq_body *bodies, const uint64_t *lengths,
                         uint32_t n, int64_t due, int64_t until, uint64_t *first_id)
{
	shmq_loan *loan;
	int r = loan_begin(p, lengths, n, due != 0, until, &loan);

	if (r)
		return r;
	for (uint64_t i = 0, at = 0; i < n; at += lengths[i++])
		memcpy(loan->targets ? loan_body(loan, 0, (uint32_t)i) : loan->scratch + at,
		       bodies[i].data, lengths[i]);
	/* Wait a little, so that the copy is not thrown away for a lock that is busy just now. */
	r = shmq_loan_commit(loan, due, later(now_ns(), NS_PER_S / 10), first_id);
	if (r)
		(void)shmq_loan_cancel(loan, later(now_ns(), NS_PER_S));
	shmq_loan_free(loan);
	return r;
}

static int publish(shmq_producer *p, const shmq_body *bodies, uint32_t n, int64_t due,
                   const shmq_mark *mark, int64_t until, uint64_t *first_id)
{
	uint64_t few[256], *lengths = n <= 256 ? few : malloc(n * sizeof(uint64_t));
	bool large;
	int r;

	if (!lengths)
		return SHMQ_NO_MEMORY;
	because_nothing();
	r = check_bodies(p, bodies, n, lengths, &large);
	if (!r)
		r = check_due(p, due);
	if (!r)
		/* Marked messages are copied under the lock, large or not: the mark belongs to their
		 * commit. */
		r = large && !mark ? publish_large(p, bodies, lengths, n, due, until, first_id)
		                   : publish_small(p, bodies, lengths, n, due, mark, until, first_id);
	if (lengths != few)
		free(lengths);
	return r;
}

int shmq_publish(shmq_producer *p, const shmq_body *bodies, uint32_t n, int64_t due, int64_t until,
                 uint64_t *first_id)
{
	return publish(p, bodies, n, due, NULL, until, first_id);
}

int shmq_publish_marked(shmq_producer *p, const shmq_body *bodies, uint32_t n,
                        const shmq_mark *mark, int64_t until, uint64_t *first_id)
{
	return publish(p, bodies, n, 0, mark, until, first_id);
}

int shmq_mark_read(shmq_producer *p, const uint64_t key[2], int64_t until, shmq_mark *out)
{
	shmq_map **targets;
	shmq_writer_desc *writer;
	uint32_t count;
	int r = producer_lock(p, until, &targets, &count);

	if (r)
		return r;
	*out = (shmq_mark){.key = {key[0], key[1]}, .epoch = UINT64_MAX - 1};
	r = writer_begin(p->b, p->topic, out, &writer);
	if (!r) {
		out->epoch = writer->epoch;
		out->upto = writer->rows;
	}
	topic_unlock(p->t);
	return r;
}
