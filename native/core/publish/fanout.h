/*
 * One publish: the same n messages into every queue of a topic. Each publish goes through these
 * steps, under the topic's publish lock (P) from the first to the last:
 *
 *   1 fanout_room     in every queue the next n free slots exist and own bodies that are large
 *                     enough. No ring head has moved.
 *   2 fanout_prepare  fields and body of every slot, then its word PREPARED(seq); then the free
 *                     rings' heads.
 *   3 fanout_commit   topic.committed = the last sequence number: one store decides for all queues
 *                     and all messages.
 *   4 fanout_flip     READY or DEFERRED, the ring entries, then each ring's tail once.
 *   5 fanout_end      unlock, then wake consumers and the spiller.
 *
 * death before 3: a rebuild makes every PREPARED slot FREE. death after 3: it makes them READY or
 * DEFERRED (rebuild.c). The sequence numbers of a publish that died before 3 are given again only
 * after that, because every locker of P repairs first.
 */
#ifndef SHMQ_FANOUT_H
#define SHMQ_FANOUT_H

#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "publish/producer.h"
#include "publish/room.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "sync/doorbell.h"

#include <string.h>

/* Slots of one queue that a loan has taken already, and their bodies. */
typedef struct lent {
	shmq_map *map;
	uint32_t *slots;
	uint8_t **bodies;
	bool published;
} lent;

#define SKIP_WORDS (SHMQ_QUEUES / 64)

/* The steps are compiled into each kind of publish, so that one without a loan does not look for
 * one: a tenth of a small publish. */
#define STEP static inline __attribute__((always_inline))

/* The parts that few messages have. One test of the pointer to it is all that the others pay. */
typedef struct extras {
	/* Of lengths[i], how many bytes are properties; NULL: no message has any. They are in
	 * properties[i], or, if `properties` is NULL, the first bytes of bodies[i]. */
	const uint32_t *blocks;
	const shmq_body *properties;
	uint8_t flags; /* enum shmq_slot_flag without PROPERTIES, which `blocks` and `sealed` say */
	bool sealed;
	uint16_t failures;
	int64_t expires; /* if a flag of HAS_EXPIRES is set */
} extras;
#define HAS_EXPIRES (SHMQ_SLOT_EXPIRES | SHMQ_SLOT_WAS_DUE)

/* No function that is not inlined takes its address: its fields would not stay in registers, which
 * costs every publish a tenth. */
typedef struct fanout {
	shmq_producer *p;
	uint32_t n;
	/* The first lengths[i] bytes of bodies[i] are published, behind the properties that the extras
	 * name, which are counted in lengths[i]. */
	const uint64_t *lengths;
	const shmq_body *bodies;
	const extras *extras; /* NULL: no message has any */
	int64_t due;          /* CLOCK_REALTIME ns; 0: READY at once */
	/* SKIP_WORDS of the caller: a bit for each target that is left out, an ephemeral one without
	 * room. Only the words for `count` targets are set. */
	uint64_t *skip;
	bool lends; /* a loan begins: its limits are checked when it ends */
	bool moves; /* from a backlog: no limit rejects it */
	/* The loan's slots; NULL: every target takes slots from its free ring. */
	lent *lent;
	uint32_t lent_count;

	/* Set by fanout_lock. */
	shmq_map **targets;
	uint32_t count;

	/* Set by fanout_number. Message i has sequence number seq + i and id first_id + i * 1024. */
	uint64_t seq, first_id, bytes;
	int64_t timestamp; /* CLOCK_REALTIME ns */
	uint16_t attempts;
} fanout;

/* Returns true if the spiller has work now that the last n messages are in the queue; the queue
 * is marked for it. Ring its doorbell after P is released. */
bool fanout_overflows(shmq_broker *b, shmq_map *map, uint32_t n, bool deferred);

/* Make `targets` the queues to publish into; P is held already. */
STEP void fanout_target(fanout *f, shmq_map **targets, uint32_t count)
{
	f->targets = targets;
	f->count = count;
	f->skip[0] = 0;
	if (count > 64)
		memset(f->skip, 0, (count + 63) / 64 * sizeof(*f->skip));
}

/* Take P, and find the queues to publish into. SHMQ_NOT_SEALED: the topic is closed to this producer;
 * the publish lock decides between a publish and the setting that closes the topic. */
STEP int fanout_lock(fanout *f, int64_t until)
{
	shmq_map **targets;
	uint32_t count;
	int r = producer_lock(f->p, until, &targets, &count);

	if (r)
		return r;
	if (__builtin_expect(ld(&f->p->t->policy) & SHMQ_POLICY_SEALED, 0) && !f->p->sealed) {
		topic_unlock(f->p->t);
		return SHMQ_NOT_SEALED;
	}
	fanout_target(f, targets, count);
	return 0;
}

STEP bool fanout_skips(const fanout *f, uint32_t target)
{
	return f->skip[target / 64] >> target % 64 & 1;
}

/* Returns true if the slot is still LOANED to this client. */
STEP bool lent_is_ours(const shmq_broker *b, const lent *l, uint32_t i)
{
	uint64_t word = ld(&l->map->slots[l->slots[i]].word);

	return SHMQ_STATE_OF(word) == SHMQ_LOANED && SHMQ_OWNER_OF(word) == b->client;
}

/* The loan's slots in this target, or NULL. They are at the same index, unless a channel was made
 * or deleted since the loan began. */
STEP lent *lent_of(const fanout *f, uint32_t target)
{
	const shmq_map *map = f->targets[target];

	if (target < f->lent_count && f->lent[target].map == map)
		return &f->lent[target];
	for (uint32_t k = 0; k < f->lent_count; k++)
		if (f->lent[k].map == map)
			return &f->lent[k];
	return NULL;
}

/* Give up, because a free ring named one slot twice or was overwritten. The next locker of P frees
 * the prepared slots, as after a death. Returns SHMQ_AGAIN; the caller unlocks. */
STEP int fanout_abort(const fanout *f)
{
	st(&f->p->t->dirty, 1);
	return SHMQ_AGAIN;
}

/* The bytes of the bodies, before fanout_number has counted them. */
STEP uint64_t bytes_of(const uint64_t *lengths, uint32_t n)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < n; i++)
		bytes += lengths[i];
	return bytes;
}

/* Returns true if a full queue is left out: an ephemeral one, unless its settings say otherwise. */
STEP bool drops_newest(const shmq_map *map)
{
	if (has_policy(map, SHMQ_POLICY_MEMORY))
		return settings_of(map)->overflow == SHMQ_OVERFLOW_DROP_NEWEST;
	return map->q->flags & SHMQ_FLAG_EPHEMERAL;
}

/* ---- 1 room ---------------------------------------------------------------------------------- */

STEP int target_room(const fanout *f, uint32_t k, int64_t until)
{
	return lent_of(f, k) ? 0
	                     : room_for(f->p->b, f->targets[k], f->lengths, f->n,
	                                f->due ? FOR_DEFERRED : FOR_READY, until);
}

/* A publish as seen by one target with limits. */
typedef struct limited {
	shmq_producer *p;
	const uint64_t *lengths;
	uint32_t n;
	bool due, lends, moves;
	bool lent; /* this target has slots and bodies already */
	int64_t until;
} limited;

STEP limited limited_of(const fanout *f, uint32_t target, int64_t until)
{
	return (limited){.p = f->p,
	                 .lengths = f->lengths,
	                 .n = f->n,
	                 .due = f->due != 0,
	                 .lends = f->lends,
	                 .moves = f->moves,
	                 .lent = lent_of(f, target) != NULL,
	                 .until = until};
}

#define DROPS 1
/* As room_for for a queue with limits. DROPS: limited_drop is to make room, when no other target
 * refuses. SHMQ_REJECTED: this one does. */
int limited_room(const limited *l, shmq_map *map);
/* Make room in a target that drops its oldest messages; nothing if its settings are others. */
int limited_drop(const limited *l, shmq_map *map);

/* Returns 0, or the status of room_for for the first target that lacks room and is not skipped; the
 * producer then waits for that one. SHMQ_AGAIN: a target was deleted just now. */
STEP int fanout_room(fanout *f, int64_t until)
{
	bool drops = false;

	for (uint32_t k = 0; k < f->count; k++) {
		shmq_map *map = f->targets[k];
		bool has_limits = has_policy(map, SHMQ_POLICY_LIMITS);
		int r;

		if (has_limits) {
			const limited seen = limited_of(f, k, until);

			r = limited_room(&seen, map);
			drops |= r == DROPS;
		} else {
			r = target_room(f, k, until);
		}
		if (r == DROPS)
			continue;
		if (r == SHMQ_FULL && drops_newest(map)) {
			f->skip[k / 64] |= UINT64_C(1) << k % 64;
			continue;
		}
		if (r == SHMQ_GONE)
			r = SHMQ_AGAIN; /* it was deleted just now: list the queues again */
		if (r == SHMQ_FULL)
			note_lacking(f->p, map, has_limits ? f->n : 0, bytes_of(f->lengths, f->n));
		if (r)
			return r;
	}
	for (uint32_t k = 0; drops && k < f->count; k++) {
		const limited seen = limited_of(f, k, until);
		int r = fanout_skips(f, k) ? 0 : limited_drop(&seen, f->targets[k]);

		if (r)
			return r;
	}
	return 0;
}

/* ---- 2 prepare ------------------------------------------------------------------------------- */

/* Give the messages a timestamp, ids and sequence numbers. The clock of the ids is stored before
 * the commit, so that no id is given twice. */
STEP void fanout_number(fanout *f)
{
	shmq_topic_desc *t = f->p->t;
	uint64_t last = ld(&t->id_clock), clock;

	f->timestamp = realtime_ns();
	clock = (uint64_t)(f->timestamp - SHMQ_EPOCH_NS) / SHMQ_ID_UNIT_NS;
	if (f->timestamp < SHMQ_EPOCH_NS || clock <= last)
		clock = last + 1;
	st(&t->id_clock, clock + f->n - 1);
	f->first_id = clock << SHMQ_ID_NODE_BITS | f->p->b->d->limits.node_id;
	f->seq = ld(&t->committed) + 1;
	f->attempts = 0;
	f->bytes = 0;
	for (uint32_t i = 0; i < f->n; i++)
		f->bytes += f->lengths[i];
	if (__builtin_expect(f->extras && f->extras->blocks, 0))
		for (uint32_t i = 0; i < f->n; i++)
			f->bytes -= f->extras->blocks[i];
}

/* Fill in the slot's rare fields, which are on the slot's second cache line. */
void extras_prepare(const extras *x, uint32_t i, shmq_slot_desc *s);

STEP void slot_prepare(const fanout *f, uint32_t i, shmq_slot_desc *s)
{
	s->id = f->first_id + ((uint64_t)i << SHMQ_ID_NODE_BITS);
	s->timestamp = f->timestamp;
	s->order = f->seq + i;
	s->deadline = f->due;
	s->length = (uint32_t)f->lengths[i];
	s->attempts = f->attempts;
	s->flags = 0;
	s->heap = SHMQ_NONE;
	if (__builtin_expect(f->extras != NULL, 0))
		extras_prepare(f->extras, i, s);
	SHMQ_KILLPOINT("publish.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_PREPARED)); /* SYNC(slot-state) */
	SHMQ_KILLPOINT("publish.prepared");
}

STEP void body_put(const fanout *f, uint32_t i, uint8_t *to)
{
	uint64_t length = f->lengths[i];

	if (__builtin_expect(f->extras && f->extras->properties && f->extras->blocks[i], 0)) {
		uint32_t block = f->extras->blocks[i];

		memcpy(to, f->extras->properties[i].data, block);
		to += block;
		length -= block;
	}
	memcpy(to, f->bodies[i].data, length);
}

STEP int target_prepare(const fanout *f, shmq_map *map)
{
	for (uint32_t i = 0; i < f->n; i++) {
		uint8_t *body;
		shmq_slot_desc *s = free_slot_for(map, i, f->lengths[i], &body);

		if (!s)
			return fanout_abort(f);
		body_put(f, i, body);
		slot_prepare(f, i, s);
	}
	return 0;
}

STEP int lent_prepare(const fanout *f, lent *l)
{
	l->published = true;
	for (uint32_t i = 0; i < f->n; i++) {
		if (!lent_is_ours(f->p->b, l, i)) {
			(void)fanout_abort(f);
			return queue_corrupt(l->map);
		}
		slot_prepare(f, i, &l->map->slots[l->slots[i]]);
	}
	return 0;
}

/* Returns 0; or fanout_abort's status, or SHMQ_CORRUPT: a lent slot is not lent any more. */
STEP int fanout_prepare(fanout *f)
{
	for (uint32_t k = 0; k < f->count; k++) {
		lent *l = lent_of(f, k);
		int r = fanout_skips(f, k) ? 0 : l ? lent_prepare(f, l) : target_prepare(f, f->targets[k]);

		if (r)
			return r;
	}
	for (uint32_t k = 0; k < f->count; k++) {
		shmq_queue_desc *q = f->targets[k]->q;

		if (fanout_skips(f, k) || lent_of(f, k))
			continue;
		st_release(&q->free_head, ld(&q->free_head) + f->n); /* SYNC(free-head) */
		SHMQ_KILLPOINT("publish.head");
	}
	return 0;
}

/* ---- 3 commit -------------------------------------------------------------------------------- */

STEP void fanout_commit(const fanout *f)
{
	st_release(&f->p->t->committed, f->seq + f->n - 1); /* SYNC(commit) */
}

/* ---- 4 flip ---------------------------------------------------------------------------------- */

/* slots: NULL for those that the free ring's head has just passed. */
STEP void target_flip(const fanout *f, shmq_map *map, const uint32_t *slots)
{
	shmq_queue_desc *q = map->q;
	_Atomic uint32_t *tail = f->due ? &q->defer_tail : &q->ready_tail;
	uint32_t *ring = f->due ? map->defer : map->ready;
	uint32_t mask = ring_mask_of(map), at = ld(tail), first = ld(&q->free_head) - f->n;

	for (uint32_t i = 0; i < f->n; i++) {
		uint32_t slot = slots ? slots[i] : map->free[(first + i) & mask];
		shmq_slot_desc *s = &map->slots[slot];

		if (!slot_is(map, slot, SHMQ_PREPARED)) {
			/* It was overwritten meanwhile: a rebuild decides it by the commit word. */
			(void)fanout_abort(f);
			continue;
		}
		/* SYNC(slot-state) */
		st_release(&s->word, word_next(ld(&s->word), f->due ? SHMQ_DEFERRED : SHMQ_READY));
		SHMQ_KILLPOINT("publish.flipped");
		ring[at++ & mask] = slot;
	}
	SHMQ_KILLPOINT("publish.ring");
	st_release(tail, at); /* SYNC(ready-tail) SYNC(defer-tail) */
	SHMQ_KILLPOINT("publish.tail");
	bump(&q->enqueued, f->n);
	bump(&q->enqueued_bytes, f->bytes);
	if (!f->due && has_policy(map, SHMQ_POLICY_BYTES))
		bump(&q->ready_bytes_in, f->bytes);
	if (f->due)
		due_note(f->p->b, map->index, f->due);
	if (__builtin_expect(f->extras && f->extras->flags & SHMQ_SLOT_EXPIRES, 0))
		expiry_note(f->p->b, map, f->extras->expires);
}

STEP void fanout_flip(const fanout *f)
{
	for (uint32_t k = 0; k < f->count; k++) {
		lent *l = lent_of(f, k);

		if (fanout_skips(f, k))
			bump(&f->targets[k]->q->dropped, f->n);
		else
			target_flip(f, f->targets[k], l ? l->slots : NULL);
	}
}

/* ---- 5 end ----------------------------------------------------------------------------------- */

/* Returns true if the messages went into a backlog that is being moved to the channels; the spiller
 * is marked for it. */
STEP bool pumps(const fanout *f)
{
	const shmq_producer *p = f->p;

	if (f->targets == p->maps || !p->channels || ld(&p->t->paused))
		return false;
	spiller_note(p->b, f->targets[0]->index);
	return true;
}

#define WAKE_LATER 16u

/* Count the messages, release P, and wake. */
STEP void fanout_end(const fanout *f)
{
	shmq_broker *b = f->p->b;
	shmq_topic_desc *t = f->p->t;
	shmq_map *later[WAKE_LATER];
	uint32_t wake = 0;
	bool ring = false;

	bump(&t->messages, f->n);
	bump(&t->bytes, f->bytes);
	fence_full(); /* SYNC(wake) */
	for (uint32_t k = 0; k < f->count; k++) {
		shmq_map *map = f->targets[k];

		ring |= fanout_overflows(b, map, f->n, f->due != 0);
		if (f->due || !ld(&map->q->takers.summary))
			continue;
		/* The system calls come after P is released, so the queue is held until then. */
		if (wake < WAKE_LATER) {
			map_hold(map);
			later[wake++] = map;
		} else {
			wake_takers(b, map, f->n);
		}
	}
	ring |= pumps(f);
	topic_unlock(t);
	for (uint32_t k = 0; k < wake; k++) {
		wake_takers(b, later[k], f->n);
		map_release(later[k]);
	}
	if (ring)
		supervisor_ring(b, SHMQ_RING_SPILLER);
}

#endif
