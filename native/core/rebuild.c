/*
 * Rebuilding a queue from its slots' state words.
 *
 * `resolve` decides every slot that was under way by the commit words. Then pins, the arena, rings,
 * heaps and counts are made again. A rebuild is idempotent and clears `dirty` last, so a death
 * anywhere inside it leaves a queue that the next locker rebuilds.
 */
#include "rebuild.h"

#include "arena.h"
#include "atomics.h"
#include "doorbell.h"
#include "handles.h"
#include "heap.h"
#include "killpoint.h"
#include "lease.h"
#include "plant.h"
#include "sane.h"
#include "segment.h"
#include "shmq.h"
#include "slots.h"
#include "status.h"

#include <string.h>

int queue_corrupt(const shmq_map *map)
{
	return because(SHMQ_CORRUPT,
	               "queue segment %llu: something has overwritten its header; delete the channel, or "
	               "stop the broker (what is on disk is kept)",
	               (unsigned long long)map->serial);
}

static int by_body(const shmq_slot_desc *x, const shmq_slot_desc *y)
{
	return x->body < y->body ? -1 : x->body > y->body;
}

/* Decide by the commit words every slot that was under way. */
static void resolve(shmq_broker *b, shmq_map *map, bool adopting)
{
	shmq_queue_desc *q = map->q;
	uint64_t committed = ld(&topic_of(b, map)->committed);
	uint64_t written = ld(&q->disk_write), read = ld(&q->disk_read);
	uint64_t chunks = ld(&q->deferred_write), loaded = ld(&q->deferred_read);
	uint32_t n = slots_of(map);

	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = &map->slots[i];
		uint64_t word = ld(&s->word);
		unsigned state = SHMQ_STATE_OF(word), next = state;

		switch (state) {
		case SHMQ_PREPARED:
			next = s->order > committed ? SHMQ_FREE : s->deadline ? SHMQ_DEFERRED : SHMQ_READY;
			break;
		case SHMQ_RESTORED:
			/* DONE: FREE below, unless pinned */
			if (s->previous == SHMQ_DEFERRED)
				next = s->pos < loaded && s->pos >> SHMQ_CHUNK_SHIFT == loaded >> SHMQ_CHUNK_SHIFT
				               ? SHMQ_DEFERRED
				               : SHMQ_DONE;
			else
				next = s->pos < read ? SHMQ_BACK : SHMQ_DONE;
			break;
		case SHMQ_SPILLING:
			if (s->previous == SHMQ_DEFERRED ? s->pos <= chunks : s->pos < written)
				next = SHMQ_DONE;
			else if (adopting)
				next = previous_of(s);
			break;
		case SHMQ_MOVING:
			next = s->move <= committed ? SHMQ_DONE : previous_of(s);
			break;
		case SHMQ_READY:
			if (s->order < SHMQ_ORDER_FIRST)
				break;
			s->after = 0; /* on its way to the requeue ring (shmq_advance): its seq is gone */
			s->pos = SHMQ_NO_POSITION;
			next = SHMQ_BACK;
			break;
		case SHMQ_FREE:
		case SHMQ_LOANED:
		case SHMQ_INFLIGHT:
		case SHMQ_DONE:
		case SHMQ_DEFERRED:
		case SHMQ_BACK:
			break;
		case SHMQ_LEASED:
			next = lease_resolve(map, s);
			break;
		default:
			next = SHMQ_FREE; /* garbage */
		}
		if (next == state)
			continue;
		if (state == SHMQ_SPILLING && next == SHMQ_BACK) {
			if (s->previous == SHMQ_INFLIGHT) {
				s->order = s->move;
				s->after = 0;
			}
			s->pos = SHMQ_NO_POSITION;
		}
		st_release(&s->word, word_next(word, next));
		SHMQ_KILLPOINT("rebuild.resolved");
	}
	lease_resolved(map);
	if (adopting)
		st(&q->spilling, 0);
}

/* Recount the pins from the clients' logs. */
static void recount_pins(shmq_broker *b, shmq_map *map)
{
	uint32_t n = slots_of(map), clients = clients_of(b);

	for (uint32_t i = 0; i < n; i++)
		map->slots[i].pins = 0;
	for (uint32_t c = 0; c < clients; c++) {
		shmq_client_desc *client = &b->clients[c];
		uint32_t high = ld(&client->pins_high);

		for (uint32_t p = 0; p < high && p < SHMQ_PINS; p++) {
			uint64_t pin = ld(&client->pins[p]);

			if (pin >> 24 == map->q->segment.serial && (pin & 0xffffff) < n)
				map->slots[pin & 0xffffff].pins++;
		}
	}
}

static void rebuild_arena(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = slots_of(map), mask = ring_mask_of(map), used = 0;
	uint64_t committed = arena_of(map);
	arena_cursor cursor = {0, 0};

	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = &map->slots[i];

		if (SHMQ_STATE_OF(ld(&s->word)) == SHMQ_FREE)
			s->capacity = 0;
		else if (!s->capacity || s->length > s->capacity)
			s->body = s->length = s->capacity = 0; /* garbage, as below */
		else
			map->free[used++ & mask] = i; /* the free ring is scratch space until it is filled */
	}
	sort_slots(map->free, mask, 0, used, map->slots, by_body);
	arena_reset(&q->arena);
	for (uint32_t i = 0; i < used; i++) {
		shmq_slot_desc *s = &map->slots[slot_in(map, &map->free[i])];

		if (!arena_claim(&q->arena, map->arena, committed, &cursor, s->body, s->capacity)) {
			/* garbage, not a death: no body, but nothing outside is touched */
			s->body = s->length = s->capacity = 0;
		}
	}
	arena_seal(&q->arena, map->arena, committed, &cursor);
}

/* Rebuild rings, heaps and counts. */
static void rebuild_lists(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = slots_of(map), mask = ring_mask_of(map);
	uint32_t ready = ld(&q->ready_head), back = ld(&q->requeue_head), nobody = ld(&q->free_head);
	uint32_t readies = 0, backs = 0, frees = 0, inflight = 0, deferred = 0, held = 0, spilling = 0;
	uint32_t leased = 0;
	uint32_t sessions = sessions_of(map);
	uint64_t held_bytes = 0, order = ld(&q->order);

	for (uint32_t i = 0; i < sessions; i++)
		st(&map->sessions[i].in_flight, 0);
	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = &map->slots[i];
		uint64_t word = ld(&s->word);
		shmq_session_desc *its;

		s->heap = SHMQ_NONE;
		switch (SHMQ_STATE_OF(word)) {
		case SHMQ_DONE:
			if (s->pins)
				break;
			st_release(&s->word, word_next(word, SHMQ_FREE));
			s->capacity = 0; /* its block is not claimed any more at the next rebuild */
			/* fall through */
		case SHMQ_FREE:
			map->free[(nobody + frees++) & mask] = i;
			continue;
		case SHMQ_READY:
			map->ready[(ready + readies++) & mask] = i;
			continue;
		case SHMQ_SPILLING:
			if (s->previous == SHMQ_DEFERRED)
				break; /* to a chunk: held until it is on disk */
			spilling++;
			continue;
		case SHMQ_BACK:
			map->requeue[(back + backs++) & mask] = i;
			break;
		case SHMQ_INFLIGHT:
			if (s->move > order)
				order = s->move; /* a take died before it counted */
			map->inflight.when[inflight] = s->deadline;
			map->inflight.slot[inflight++] = i;
			its = session_of(map, s);
			if (its)
				bump(&its->in_flight, 1);
			break;
		case SHMQ_DEFERRED:
			map->deferred.when[deferred] = s->deadline;
			map->deferred.slot[deferred++] = i;
			break;
		case SHMQ_LEASED:
			leased++;
			break;
		default: /* LOANED: its owner's; the others cannot be here */
			continue;
		}
		held++;
		held_bytes += block_bytes(s);
	}
	if (!SHMQ_PLANTED(9))
		sort_slots(map->ready, mask, ready, readies, map->slots, by_order);
	sort_slots(map->requeue, mask, back, backs, map->slots, by_order);
	SHMQ_KILLPOINT("rebuild.sorted");
	st(&q->inflight_len, inflight);
	st(&q->deferred_len, deferred);
	heap_make(&map->inflight);
	heap_make(&map->deferred);
	st(&q->order, order);
	st(&q->held, held);
	st(&q->held_bytes, held_bytes);
	st(&q->leased, leased);
	st(&q->spilling_count, spilling);
	if (ld(&q->spilling) > 1) /* garbage */
		st(&q->spilling, spilling != 0);
	q->reclaimed = nobody + frees;
	q->endowed = nobody;
	q->free_tail_seen = nobody + frees;
	q->ready_head_seen = ready;
	q->ready_tail_seen = ready + readies;
	st_release(&q->free_tail, nobody + frees);
	st(&q->defer_head, ld(&q->defer_tail));
	st_release(&q->requeue_tail, back + backs);
	requeue_firsts_find(map);
	st_release(&q->ready_tail, ready + readies);
}

/* A take-over that died before the role was stored leaves flags that belong to the channel. */
static void derive_flags(shmq_broker *b, shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	shmq_entry_desc *e = &b->entries[map->index];
	bool ephemeral;

	if (map->index >= queues_of(b) || !entry_is(b, map->index, map->topic) ||
	    e->serial != q->segment.serial)
		return;
	if (ld(&e->role) == SHMQ_ROLE_CHANNEL) {
		ephemeral = shmq_name_ephemeral(e->name, strnlen(e->name, SHMQ_NAME));
	} else {
		ephemeral = topic_of(b, map)->flags & SHMQ_FLAG_EPHEMERAL;
		st(&q->base_pending, 0);
	}
	q->flags = e->flags = ephemeral ? SHMQ_FLAG_EPHEMERAL : 0;
}

int queue_rebuild(shmq_broker *b, shmq_map *map, bool adopting)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = ld(&q->slots_committed), mask;

	st(&q->dirty, 1);
	SHMQ_KILLPOINT("rebuild.begin");
	/* The count of slots is never lowered: behind a smaller one there may be messages. */
	if (!SANE(n - 1 < slots_of(map) && n >= ld(&map->slots_backed) && !slots_behind(map, n) &&
	          arena_of(map) >= SHMQ_ARENA_FIRST))
		return queue_corrupt(map);
	for (mask = 0; mask < n - 1; mask = 2 * mask + 1)
		;
	st(&q->ring_mask, mask);
	derive_flags(b, map);
	resolve(b, map, adopting);
	recount_pins(b, map);
	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = &map->slots[i];
		uint64_t word = ld(&s->word);

		if (SHMQ_STATE_OF(word) == SHMQ_DONE && !s->pins)
			st_release(&s->word, word_next(word, SHMQ_FREE));
	}
	SHMQ_KILLPOINT("rebuild.decided");
	rebuild_arena(map);
	SHMQ_KILLPOINT("rebuild.arena");
	rebuild_lists(map);
	st(&b->next_deadline[map->index], INT64_MAX);
	deadline_note(b, map);
	st(&b->next_due[map->index], heap_first(&map->deferred));
	scanner_ring(b, INT64_MAX, heap_first(&map->deferred));
	st(&q->need_bytes, 0);
	st(&q->need_slots, 0);
	SHMQ_KILLPOINT("rebuild.clear");
	st_release(&q->dirty, 0);
	wait_wake(b, &q->takers, WAKE_ALL);
	wait_wake(b, &q->space, WAKE_ALL);
	return 0;
}

/* Returns true if some process may go on reading the body: it is in flight, viewed, lent or
 * leased. */
static bool may_be_read(const shmq_slot_desc *s)
{
	unsigned state = SHMQ_STATE_OF(ld(&s->word));

	return state == SHMQ_INFLIGHT || state == SHMQ_LOANED || state == SHMQ_LEASED || s->pins;
}

void queue_discard(shmq_map *map)
{
	uint32_t n = slots_of(map), mask = ring_mask_of(map), used = 0;
	uint64_t arena = (uint64_t)(map->arena - map->base), from = 0;

	/* The free ring is scratch space: nobody will use this queue again. */
	for (uint32_t i = 0; i < n; i++)
		if (map->slots[i].capacity && may_be_read(&map->slots[i]) && body_is_in(map, &map->slots[i]))
			map->free[used++ & mask] = i;
	sort_slots(map->free, mask, 0, used, map->slots, by_body);
	for (uint32_t i = 0; i < used; i++) {
		const shmq_slot_desc *s = &map->slots[slot_in(map, &map->free[i & mask])];
		uint64_t body = once(s->body), end = body + once(s->capacity);

		if (body > map->arena_max || end > map->arena_max)
			return; /* overwritten since */
		if (body > from)
			segment_punch(map->base, arena + from, arena + body);
		if (end > from)
			from = end;
	}
	segment_punch(map->base, arena + from, arena + map->arena_max);
}

bool adds_up(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = slots_of(map), loaned = 0, leased = 0, unlisted = 0;
	uint64_t listed = (uint64_t)ring_count(&q->requeue_head, &q->requeue_tail) +
	                  ld(&q->inflight_len) + ld(&q->deferred_len);
	uint64_t all = (uint64_t)ring_count(&q->ready_head, &q->ready_tail) + ld(&q->held) +
	               ring_count(&q->defer_head, &q->defer_tail) + ld(&q->spilling_count) +
	               ring_count(&q->free_head, &q->free_tail);
	uint64_t bytes = 0;

	if (!counts_are_sane(map))
		return false;
	if (all == n && listed + ld(&q->leased) == ld(&q->held) &&
	    ld(&q->held_bytes) <= bytes_budget(map))
		return true;
	/* Loans, views, leases, and chunks that are being written are in no list. */
	for (uint32_t i = 0; i < n; i++) {
		const shmq_slot_desc *s = &map->slots[i];
		unsigned state = SHMQ_STATE_OF(ld(&s->word));
		bool chunk = state == SHMQ_SPILLING && s->previous == SHMQ_DEFERRED;

		loaned += state == SHMQ_LOANED;
		leased += state == SHMQ_LEASED;
		unlisted += state == SHMQ_DONE || chunk;
		if (state == SHMQ_DONE || state == SHMQ_LEASED || chunk || state == SHMQ_BACK ||
		    state == SHMQ_INFLIGHT || (state == SHMQ_DEFERRED && s->heap != SHMQ_NONE))
			bytes += block_bytes(s);
	}
	return all + loaned == n && listed + leased + unlisted == ld(&q->held) &&
	       leased == ld(&q->leased) && bytes == ld(&q->held_bytes);
}
