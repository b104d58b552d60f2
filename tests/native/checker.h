/*
 * An independent recount of a queue, from its bytes alone: slots, rings, heaps, arena, the clients'
 * logs. Shares no code with the core but the layout; believes no counter before it has counted
 * itself. To be called while nobody is at work on the queue and nothing is left to repair.
 *
 * checker_queue: "" if all is right, else the first sentence that is not true.
 */
#ifndef CHECKER_H
#define CHECKER_H

#include "memory/layout.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The bytes that a slot in use adds to in_use_bytes. */
#define CHECKER_HELD_BYTES(s) ((uint64_t)(s)->capacity + SHMQ_ARENA_HEAD)

enum checker_place {
	NOWHERE,
	IN_READY,
	IN_DEFER,
	IN_REQUEUE,
	IN_FREE,
	IN_FLIGHT_HEAP,
	IN_DEFERRED_HEAP
};

typedef struct checker_block {
	uint64_t at, size;
	uint32_t slot;
} checker_block;

typedef struct checker {
	const uint8_t *directory, *base;
	const shmq_directory_desc *d;
	const shmq_queue_desc *q;
	const shmq_slot_desc *slots;
	uint32_t n, mask;
	uint8_t *place;
	uint32_t states[256];
	uint32_t to_chunks; /* SPILLING that come from DEFERRED */
	char wrong[256];
} checker;

static const char *const checker_names[] = {
	"nowhere",       "the ready ring",     "the defer ring",   "the requeue ring",
	"the free ring", "the in-flight heap", "the deferred heap"};

__attribute__((format(printf, 2, 3))) static inline bool checker_says(checker *c,
                                                                      const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(c->wrong, sizeof(c->wrong), format, args);
	va_end(args);
	return false;
}

static inline unsigned checker_state(const checker *c, uint32_t slot)
{
	return (unsigned)(c->slots[slot].word & 0xff);
}

static inline bool checker_put(checker *c, uint32_t slot, enum checker_place place)
{
	if (slot >= c->n)
		return checker_says(c, "%s holds slot %u of %u", checker_names[place], slot, c->n);
	if (c->place[slot])
		return checker_says(c, "slot %u is in %s and in %s", slot, checker_names[c->place[slot]],
		                    checker_names[place]);
	c->place[slot] = (uint8_t)place;
	return true;
}

/* Every entry once; in rising order of `order` if it is to be. */
static inline bool checker_ring(checker *c, uint64_t at, uint32_t head, uint32_t tail,
                                enum checker_place place, bool ordered)
{
	const uint32_t *ring = (const void *)(c->base + at);
	uint64_t last = 0;

	if (tail - head > c->n)
		return checker_says(c, "%s has %u entries for %u slots", checker_names[place], tail - head,
		                    c->n);
	for (uint32_t i = head; i != tail; i++) {
		uint32_t slot = ring[i & c->mask];

		if (!checker_put(c, slot, place))
			return false;
		if (ordered && c->slots[slot].order <= last)
			return checker_says(c, "%s: slot %u (%llu) comes behind %llu", checker_names[place],
			                    slot, (unsigned long long)c->slots[slot].order,
			                    (unsigned long long)last);
		last = c->slots[slot].order;
	}
	return true;
}

static inline bool checker_heap(checker *c, uint64_t when_at, uint64_t slot_at, uint32_t length,
                                enum checker_place place)
{
	const int64_t *when = (const void *)(c->base + when_at);
	const uint32_t *slot = (const void *)(c->base + slot_at);

	if (length > c->n)
		return checker_says(c, "%s has %u entries", checker_names[place], length);
	for (uint32_t i = 0; i < length; i++) {
		if (!checker_put(c, slot[i], place))
			return false;
		if (i && when[(i - 1) / SHMQ_HEAP_WAYS] > when[i])
			return checker_says(c, "%s: entry %u is earlier than its parent", checker_names[place],
			                    i);
		if (c->slots[slot[i]].heap != i)
			return checker_says(c, "slot %u thinks it is at %u of %s, it is at %u", slot[i],
			                    c->slots[slot[i]].heap, checker_names[place], i);
		if (c->slots[slot[i]].deadline != when[i])
			return checker_says(c, "slot %u: another time in %s than in the slot", slot[i],
			                    checker_names[place]);
	}
	return true;
}

static inline bool checker_places(checker *c)
{
	const shmq_queue_desc *q = c->q;

	if (!checker_ring(c, q->ready_at, q->ready_head, q->ready_tail, IN_READY, true) ||
	    !checker_ring(c, q->defer_at, q->defer_head, q->defer_tail, IN_DEFER, false) ||
	    !checker_ring(c, q->requeue_at, q->requeue_head, q->requeue_tail, IN_REQUEUE, true) ||
	    !checker_ring(c, q->free_at, q->free_head, q->free_tail, IN_FREE, false) ||
	    !checker_heap(c, q->in_flight_when_at, q->in_flight_slot_at, q->in_flight_len,
	                  IN_FLIGHT_HEAP) ||
	    !checker_heap(c, q->deferred_when_at, q->deferred_slot_at, q->deferred_len,
	                  IN_DEFERRED_HEAP))
		return false;
	for (uint32_t i = 0; i < c->n; i++) {
		static const uint8_t right[SHMQ_STATES] = {[SHMQ_FREE] = IN_FREE,
		                                           [SHMQ_READY] = IN_READY,
		                                           [SHMQ_IN_FLIGHT] = IN_FLIGHT_HEAP,
		                                           [SHMQ_REQUEUED] = IN_REQUEUE,
		                                           [SHMQ_DEFERRED] = IN_DEFERRED_HEAP};
		unsigned state = checker_state(c, i);

		if (state >= SHMQ_STATES)
			return checker_says(c, "slot %u has no state (%u)", i, state);
		c->states[state]++;
		c->to_chunks += state == SHMQ_SPILLING && c->slots[i].previous == SHMQ_DEFERRED;
		if (state == SHMQ_PREPARED || state == SHMQ_RESTORED || state == SHMQ_MOVING)
			return checker_says(c, "slot %u is still undecided (state %u)", i, state);
		if (c->place[i] != right[state] && !(state == SHMQ_DEFERRED && c->place[i] == IN_DEFER))
			return checker_says(c, "slot %u has state %u and is in %s", i, state,
			                    checker_names[c->place[i]]);
		if (c->place[i] != IN_FLIGHT_HEAP && c->place[i] != IN_DEFERRED_HEAP &&
		    c->slots[i].heap != SHMQ_NONE)
			return checker_says(c, "slot %u is in no heap and thinks it is", i);
	}
	return true;
}

static inline bool checker_limits(checker *c)
{
	const shmq_queue_desc *q = c->q;
	const shmq_topic_desc *t = (const shmq_topic_desc *)(const void *)(c->directory +
	                                                                   c->d->topics_at) +
	                           q->topic;

	for (uint32_t i = 0; i < c->n; i++) {
		if (checker_state(c, i) == SHMQ_READY && c->slots[i].order > t->committed)
			return checker_says(c, "slot %u is READY beyond the commit word", i);
		if (checker_state(c, i) == SHMQ_REQUEUED && c->slots[i].order > q->order)
			return checker_says(c, "slot %u is REQUEUED beyond the order counter", i);
		if (checker_state(c, i) == SHMQ_SPILLING &&
		    (c->slots[i].previous == SHMQ_DEFERRED ? c->slots[i].pos <= q->deferred_write
		                                           : c->slots[i].pos < q->disk_write))
			return checker_says(c, "slot %u is SPILLING and on disk already", i);
	}
	if (q->disk_read > q->disk_write)
		return checker_says(c, "the read position is behind the write position");
	if (q->free_tail_cached - q->free_head > q->free_tail - q->free_head)
		return checker_says(c, "P has seen more free slots than there are");
	if (q->ready_tail - q->ready_head_cached < q->ready_tail - q->ready_head)
		return checker_says(c, "P has seen the ready ring's head ahead of where it is");
	if ((int32_t)(q->ready_tail_cached - q->ready_tail) > 0)
		return checker_says(c, "D has seen the ready ring's tail ahead of where it is");
	if (c->states[SHMQ_SPILLING] != c->to_chunks && !q->spilling)
		return checker_says(c, "slots are SPILLING and nobody spills");
	return true;
}

static inline bool checker_counts(checker *c)
{
	const shmq_queue_desc *q = c->q;
	uint32_t held = 0, deferred_ring = q->defer_tail - q->defer_head, ready, all;
	uint64_t in_use_bytes = 0;

	for (uint32_t i = 0; i < c->n; i++) {
		unsigned state = checker_state(c, i);

		if (state == SHMQ_IN_FLIGHT || state == SHMQ_REQUEUED || state == SHMQ_PINNED ||
		    state == SHMQ_LEASED || (state == SHMQ_DEFERRED && c->place[i] != IN_DEFER) ||
		    (state == SHMQ_SPILLING && c->slots[i].previous == SHMQ_DEFERRED)) {
			held++;
			in_use_bytes += CHECKER_HELD_BYTES(&c->slots[i]);
		}
	}
	if (q->in_use != held)
		return checker_says(c, "held is %u, counted %u", q->in_use, held);
	if (q->in_use_bytes != in_use_bytes)
		return checker_says(c, "in_use_bytes is %llu, counted %llu",
		                    (unsigned long long)q->in_use_bytes, (unsigned long long)in_use_bytes);
	if (q->in_flight_len != c->states[SHMQ_IN_FLIGHT])
		return checker_says(c, "in_flight_len is %u, counted %u", q->in_flight_len,
		                    c->states[SHMQ_IN_FLIGHT]);
	if (q->deferred_len + deferred_ring != c->states[SHMQ_DEFERRED])
		return checker_says(c, "deferred: %u and %u, counted %u", q->deferred_len, deferred_ring,
		                    c->states[SHMQ_DEFERRED]);
	if (q->spilling_count != c->states[SHMQ_SPILLING] - c->to_chunks)
		return checker_says(c, "spilling_count is %u, counted %u", q->spilling_count,
		                    c->states[SHMQ_SPILLING] - c->to_chunks);
	ready = q->ready_tail - q->ready_head;
	all = (q->free_tail - q->free_head) + held + deferred_ring + ready + c->states[SHMQ_LOANED] +
	      c->states[SHMQ_SPILLING] - c->to_chunks;
	if (all != c->n)
		return checker_says(c, "%u slots accounted for, there are %u", all, c->n);
	return true;
}

/* A slot's owner, and the owners' logs of their slots, agree. */
static inline bool checker_owners(checker *c)
{
	const shmq_client_desc *clients = (const void *)(c->directory + c->d->clients_at);
	const shmq_session_desc *sessions = (const void *)(c->base + c->q->sessions_at);
	uint32_t in_flight[SHMQ_SESSIONS] = {0}, *pins = calloc(c->n, sizeof(*pins));
	bool ok = true;

	for (uint32_t k = 0; k < c->d->clients_committed; k++)
		for (uint32_t p = 0; p < SHMQ_PINS; p++) {
			uint64_t pin = clients[k].pins[p];

			if (pin && clients[k].state == SHMQ_CLIENT_FREE)
				ok = checker_says(c, "client entry %u is free and pins something", k);
			if (pin >> 24 == c->q->segment.serial && (pin & 0xffffff) < c->n)
				pins[pin & 0xffffff]++;
		}
	for (uint32_t i = 0; ok && i < c->n; i++) {
		unsigned state = checker_state(c, i), owner = SHMQ_OWNER_OF(c->slots[i].word);
		uint32_t session = c->slots[i].session;

		if (c->slots[i].pins != pins[i])
			ok = checker_says(c, "slot %u has %u pins, the logs say %u", i, c->slots[i].pins,
			                  pins[i]);
		else if (state == SHMQ_PINNED && !pins[i])
			ok = checker_says(c, "slot %u is PINNED without a pin", i);
		else if (state == SHMQ_FREE && pins[i])
			ok = checker_says(c, "slot %u is FREE and pinned", i);
		else if (state != SHMQ_IN_FLIGHT && state != SHMQ_LOANED)
			continue;
		else if (owner >= c->d->clients_committed || clients[owner].state != SHMQ_CLIENT_LIVE)
			ok = checker_says(c, "slot %u belongs to client %u, which is not there", i, owner);
		else if (!(clients[owner].touched[c->q->index / 64] >> c->q->index % 64 & 1))
			ok = checker_says(c, "client %u owns slot %u and has not touched the queue", owner, i);
		else if (state == SHMQ_IN_FLIGHT &&
		         (session >= c->q->sessions_committed || sessions[session].client != owner + 1))
			ok = checker_says(c, "slot %u is in flight to session %u, not client %u's", i, session,
			                  owner);
		else if (state == SHMQ_IN_FLIGHT)
			in_flight[session]++;
	}
	for (uint32_t i = 0; ok && i < c->q->sessions_committed; i++)
		if (sessions[i].client && sessions[i].in_flight != in_flight[i])
			ok = checker_says(c, "session %u has %u in flight, counted %u", i,
			                  sessions[i].in_flight, in_flight[i]);
	free(pins);
	return ok;
}

static int checker_by_place(const void *x, const void *y)
{
	const checker_block *a = x, *b = y;

	return a->at < b->at ? -1 : a->at > b->at;
}

/* Blocks in memory order: tags agree, no two free neighbours, every used one is one slot's. */
static inline bool checker_blocks(checker *c, const checker_block *owned, uint32_t count,
                                  uint32_t *free_count)
{
	const uint8_t *arena = c->base + c->q->arena_at;
	uint64_t end = c->q->arena_committed - SHMQ_ARENA_UNIT, before = 0, free_bytes = 0, used = 0;
	bool last_free = false;
	uint32_t next = 0;

	*free_count = 0;
	for (uint64_t at = 0; at < end;) {
		uint64_t word = *(const uint64_t *)(const void *)(arena + at), size = word & ~UINT64_C(63);

		if (!size || size > end - at || word & 62)
			return checker_says(c, "the block at %llu has an impossible size (%llx)",
			                    (unsigned long long)at, (unsigned long long)word);
		if (*(const uint64_t *)(const void *)(arena + at + 8) != before)
			return checker_says(c, "the block at %llu does not know the one before it",
			                    (unsigned long long)at);
		if (word & 1) {
			if (next == count || owned[next].at != at || owned[next].size != size)
				return checker_says(c, "the block at %llu (%llu bytes) is nobody's",
				                    (unsigned long long)at, (unsigned long long)size);
			next++;
			used += size;
		} else {
			if (last_free)
				return checker_says(c, "two free blocks at %llu", (unsigned long long)at);
			free_bytes += size;
			++*free_count;
		}
		last_free = !(word & 1);
		before = size;
		at += size;
	}
	if (next != count)
		return checker_says(c, "slot %u's body is in no block", owned[next].slot);
	if (used + free_bytes != end)
		return checker_says(c, "the arena has %llu bytes used and %llu free of %llu",
		                    (unsigned long long)used, (unsigned long long)free_bytes,
		                    (unsigned long long)end);
	if (c->q->arena.free_bytes != free_bytes)
		return checker_says(c, "the arena says %llu bytes are free, counted %llu",
		                    (unsigned long long)c->q->arena.free_bytes,
		                    (unsigned long long)free_bytes);
	return true;
}

static inline bool checker_bodies(checker *c)
{
	uint64_t end = c->q->arena_committed - SHMQ_ARENA_UNIT, listed = 0;
	const uint8_t *arena = c->base + c->q->arena_at;
	checker_block *owned = calloc(c->n + 1, sizeof(*owned));
	uint32_t count = 0, free_count = 0;
	bool ok = true;

	for (uint32_t i = 0; ok && i < c->n; i++) {
		const shmq_slot_desc *s = &c->slots[i];

		if (checker_state(c, i) != SHMQ_FREE && s->length > s->capacity)
			ok = checker_says(c, "slot %u: %u bytes in a block of %u", i, s->length, s->capacity);
		if (!s->capacity)
			continue;
		owned[count++] = (checker_block){s->body - SHMQ_ARENA_HEAD,
		                                 (uint64_t)s->capacity + SHMQ_ARENA_HEAD, i};
		if (s->body < SHMQ_ARENA_HEAD || owned[count - 1].at + owned[count - 1].size > end)
			ok = checker_says(c, "slot %u: its body lies outside", i);
	}
	qsort(owned, count, sizeof(*owned), checker_by_place);
	for (uint32_t i = 1; ok && i < count; i++)
		if (owned[i - 1].at + owned[i - 1].size > owned[i].at)
			ok = checker_says(c, "the bodies of slots %u and %u overlap", owned[i - 1].slot,
			                  owned[i].slot);
	ok = ok && checker_blocks(c, owned, count, &free_count);
	for (unsigned f = 0; ok && f < SHMQ_ARENA_FL; f++)
		for (unsigned s = 0; ok && s < SHMQ_ARENA_SL; s++)
			for (uint64_t at = c->q->arena.heads[f][s]; ok && at; listed++) {
				const uint64_t *block = (const void *)(arena + at - 1);

				if (at > end || (at - 1) % SHMQ_ARENA_UNIT || block[0] & 1 || listed > free_count)
					ok = checker_says(c, "a list of free blocks holds %llu",
					                  (unsigned long long)at);
				else
					at = block[2];
			}
	if (ok && listed != free_count)
		ok = checker_says(c, "%llu free blocks are listed, counted %u", (unsigned long long)listed,
		                  free_count);
	free(owned);
	return ok;
}

/* The scan's columns are lower bounds. */
static inline bool checker_columns(checker *c)
{
	int64_t deadline = *(const int64_t *)(const void *)(c->directory + c->d->deadline_at +
	                                                    c->q->index * sizeof(int64_t));
	int64_t due = *(const int64_t *)(const void *)(c->directory + c->d->due_at +
	                                               c->q->index * sizeof(int64_t));

	for (uint32_t i = 0; i < c->n; i++) {
		unsigned state = checker_state(c, i);

		if (state == SHMQ_IN_FLIGHT && c->slots[i].deadline < deadline)
			return checker_says(c, "slot %u times out before next_deadline", i);
		if (state == SHMQ_DEFERRED && c->slots[i].deadline < due)
			return checker_says(c, "slot %u is due before next_due", i);
	}
	return true;
}

static inline const char *checker_queue(const void *directory, const void *queue)
{
	static char answer[256];
	checker c = {.directory = directory,
	             .base = queue,
	             .d = directory,
	             .q = queue,
	             .slots = (const void *)((const uint8_t *)queue +
	                                     ((const shmq_queue_desc *)queue)->slots_at)};

	c.n = c.q->slots_committed;
	c.mask = c.q->ring_mask;
	c.place = calloc(c.n, 1);
	if (c.q->dirty)
		checker_says(&c, "it is dirty");
	else if (c.mask & (c.mask + 1) || c.mask + 1 < c.n || c.n > c.q->slots_max)
		checker_says(&c, "%u slots, ring mask %u", c.n, c.mask);
	else
		(void)(checker_places(&c) && checker_limits(&c) && checker_counts(&c) &&
		       checker_owners(&c) && checker_bodies(&c) && checker_columns(&c));
	free(c.place);
	memcpy(answer, c.wrong, sizeof(answer));
	return answer;
}

#endif
