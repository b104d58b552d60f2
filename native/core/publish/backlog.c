/*
 * Moving a backlog to several channels, one message in one transaction, under the publish lock (P)
 * and the backlog's deliver lock (D): MOVING(seq) in the backlog, PREPARED(seq) in every channel,
 * the commit word, READY, and FREE in the backlog. death: the commit word decides, as for a
 * publish.
 */
#include "base/atomics.h"
#include "base/killpoint.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/segment.h"
#include "publish/fanout.h"
#include "publish/producer.h"
#include "queue/locking.h"
#include "queue/slots.h"
#include "shmq.h"
#include "shmq_supervisor.h"

/* Find the next message of a backlog: in the requeue ring; then, if nothing is on disk, in the
 * ready ring; then among the deferred ones. */
static uint32_t backlog_next(shmq_map *map, unsigned *from)
{
	shmq_queue_desc *q = map->q;
	uint32_t mask = ring_mask_of(map);

	if (ld(&q->requeue_head) != ld(&q->requeue_tail)) {
		*from = SHMQ_REQUEUED;
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

/* Remove a message that was copied to the channels from the backlog. */
static void backlog_pop(shmq_map *map, uint32_t slot, unsigned from)
{
	shmq_queue_desc *q = map->q;

	if (from == SHMQ_REQUEUED)
		st_release(&q->requeue_head, ld(&q->requeue_head) + 1); /* SYNC(requeue-head) */
	else if (from == SHMQ_READY) {
		st_release(&q->ready_head, ld(&q->ready_head) + 1); /* SYNC(ready-head) */
		ready_bytes_left(map, body_bytes(&map->slots[slot]));
	} else
		heap_remove(&map->deferred, slot);
	if (from != SHMQ_READY)
		in_use_remove(map, slot);
	SHMQ_KILLPOINT("pump.popped");
	slot_release(map, slot);
}

/* Move one message in one transaction. P and the backlog's D are held. */
static int pump_one(shmq_producer *p, shmq_map *backlog, int64_t until)
{
	unsigned from;
	uint32_t slot = backlog_next(backlog, &from);
	shmq_slot_desc *s = &backlog->slots[slot];
	uint64_t skip[SKIP_WORDS], length;
	shmq_body body;
	extras more = {0};
	fanout f = {.p = p,
	            .n = 1,
	            .lengths = &length,
	            .bodies = &body,
	            .extras = &more,
	            .skip = skip,
	            .moves = true};
	span at;
	int r;

	if (from == SHMQ_FREE)
		return SHMQ_EMPTY;
	if (!slot_is(backlog, slot, from) || !body_in(backlog, s, &at)) {
		queue_broken(backlog);
		return SHMQ_AGAIN;
	}
	length = (uint64_t)at.properties + at.length;
	body = (shmq_body){backlog->arena + at.body - at.properties, length};
	more.blocks = at.properties ? &at.properties : NULL;
	more.sealed = at.sealed;
	more.flags = s->flags & (SHMQ_SLOT_EXPIRES | SHMQ_SLOT_WAS_DUE | SHMQ_SLOT_FAILED);
	more.expires = s->flags & HAS_EXPIRES ? s->expires : 0;
	more.failures = (uint16_t)(ld(&s->failures) >> 16);
	f.due = from == SHMQ_DEFERRED ? slot_due(s) : 0;
	fanout_target(&f, p->maps, p->channels);
	r = fanout_room(&f, until);
	if (r)
		return r;
	f.seq = ld(&p->t->committed) + 1;
	f.first_id = s->id;
	f.timestamp = s->timestamp;
	f.attempts = s->attempts;
	f.bytes = at.length;
	s->previous = (uint8_t)from;
	s->move = f.seq;
	SHMQ_KILLPOINT("pump.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_MOVING)); /* SYNC(slot-state) */
	SHMQ_KILLPOINT("pump.moving");
	r = fanout_prepare(&f);
	if (r)
		return r;
	fanout_commit(&f);
	SHMQ_KILLPOINT("pump.committed");
	fanout_flip(&f);
	backlog_pop(backlog, slot, from);
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
			while (*moved < n && !(r = pump_one(p, backlog, until)))
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
