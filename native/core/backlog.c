/*
 * Moving a backlog to several channels, one message in one transaction, under the publish lock and
 * the backlog's deliver lock: MOVING(seq) in the backlog, PREPARED(seq) in every channel, the
 * commit word, READY, and FREE in the backlog. death: the commit word decides, as for a publish.
 */
#include "atomics.h"
#include "handles.h"
#include "heap.h"
#include "killpoint.h"
#include "locking.h"
#include "producer.h"
#include "room.h"
#include "segment.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "slots.h"

#include <string.h>

/* The next message of a backlog: requeue ring, then (nothing on disk) ready ring, then deferred. */
static uint32_t backlog_next(shmq_map *map, unsigned *from)
{
	shmq_queue_desc *q = map->q;
	uint32_t mask = ring_mask_of(map);

	if (ld(&q->requeue_head) != ld(&q->requeue_tail)) {
		*from = SHMQ_BACK;
		return map->requeue[ld(&q->requeue_head) & mask];
	}
	if (!on_disk(q) && ld(&q->ready_head) != ld(&q->ready_tail)) {
		*from = SHMQ_READY;
		return map->ready[ld(&q->ready_head) & mask];
	}
	if (!on_disk(q) && ld(&q->deferred_len)) {
		*from = SHMQ_DEFERRED;
		return map->deferred.slot[0];
	}
	*from = SHMQ_FREE;
	return SHMQ_NONE;
}

/* One message, one transaction. P and the backlog's D held. */
static int pump_one(shmq_broker *b, shmq_topic_desc *t, shmq_map *backlog, shmq_map **channels,
                    uint32_t count, int64_t until)
{
	shmq_queue_desc *q = backlog->q;
	unsigned from;
	uint32_t slot = backlog_next(backlog, &from);
	shmq_slot_desc *s = &backlog->slots[slot];
	uint64_t length, skip[SKIP_WORDS], seq = ld(&t->committed) + 1;
	int64_t due;
	span at;

	if (from == SHMQ_FREE)
		return SHMQ_EMPTY;
	if (!slot_is(backlog, slot, from) || !body_in(backlog, s, &at)) {
		queue_broken(backlog);
		return SHMQ_AGAIN;
	}
	length = at.length;
	due = from == SHMQ_DEFERRED ? s->deadline : 0;
	fanout_skip_none(skip, count);
	for (uint32_t k = 0; k < count; k++) {
		int r = room_for(b, channels[k], &length, 1, due ? FOR_DEFERRED : FOR_READY, until);

		if (r == SHMQ_FULL && channels[k]->q->flags & SHMQ_FLAG_EPHEMERAL)
			SKIP(skip, k);
		else if (r)
			return r;
	}
	s->previous = (uint16_t)from;
	s->move = seq;
	SHMQ_KILLPOINT("pump.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_MOVING));
	SHMQ_KILLPOINT("pump.moving");
	for (uint32_t k = 0; k < count; k++) {
		uint8_t *body;
		shmq_slot_desc *to = free_slot_for(channels[k], 0, length, &body);

		if (SKIPPED(skip, k))
			continue;
		if (!to) { /* it was overwritten meanwhile: repaired as after a death */
			st(&t->dirty, 1);
			return SHMQ_AGAIN;
		}
		memcpy(body, backlog->arena + at.body, length);
		fanout_prepare(to, s->id, seq, s->timestamp, due, length);
		to->attempts = s->attempts;
		st_release(&channels[k]->q->free_head, ld(&channels[k]->q->free_head) + 1);
	}
	st_release(&t->committed, seq);
	SHMQ_KILLPOINT("pump.committed");
	for (uint32_t k = 0; k < count; k++)
		if (SKIPPED(skip, k))
			bump(&channels[k]->q->dropped, 1);
		else
			fanout_flip(b, channels[k], NULL, ld(&channels[k]->q->free_head) - 1, 1, due, length);
	if (from == SHMQ_BACK)
		st_release(&q->requeue_head, ld(&q->requeue_head) + 1);
	else if (from == SHMQ_READY)
		st_release(&q->ready_head, ld(&q->ready_head) + 1);
	else
		heap_remove(&backlog->deferred, slot);
	if (from != SHMQ_READY)
		held_remove(backlog, slot);
	SHMQ_KILLPOINT("pump.popped");
	slot_release(backlog, slot);
	return 0;
}

int shmq_pump(shmq_broker *b, uint32_t topic, uint32_t generation, uint32_t n, int64_t until,
              uint32_t *moved)
{
	shmq_producer *p;
	shmq_map **targets;
	uint32_t count;
	int r = shmq_producer_open(b, topic, generation, &p);

	*moved = 0;
	if (r)
		return r;
	r = producer_lock(p, until, &targets, &count);
	if (r) {
		shmq_producer_close(p);
		return r == SHMQ_NEED_BACKLOG ? SHMQ_EMPTY : r;
	}
	if (ld(&p->t->paused) || !p->channels || !p->backlog) {
		r = SHMQ_EMPTY;
	} else {
		shmq_map *backlog = p->maps[p->channels];

		r = queue_lock_under(b, backlog, until);
		if (!r) {
			defer_drain(b, backlog);
			while (*moved < n && !(r = pump_one(b, p->t, backlog, p->maps, p->channels, until)))
				++*moved;
			queue_unlock(backlog);
		}
	}
	for (uint32_t k = 0; *moved && k < p->channels; k++)
		(void)fanout_overflows(b, p->maps[k], UINT32_MAX, true); /* the caller checks */
	topic_unlock(p->t);
	for (uint32_t k = 0; *moved && k < p->channels; k++)
		wake_takers(b, p->maps[k], *moved);
	if (*moved && p->backlog)
		wake_space(b, p->maps[p->channels]);
	shmq_producer_close(p);
	return *moved ? 0 : r;
}
