/*
 * Rebuilding a queue from its slots' state words.
 *
 * `resolve` decides every slot that was under way by the commit words. Then pins, the arena, rings,
 * heaps and counts are made again. A rebuild is idempotent and clears `dirty` last, so a death
 * anywhere inside it leaves a queue that the next locker rebuilds.
 */
#include "queue/rebuild.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/killpoint.h"
#include "base/status.h"
#include "memory/arena.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/segment.h"
#include "queue/lease.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "queue/sort.h"
#include "shmq.h"
#include "sync/doorbell.h"

#include <string.h>

int queue_corrupt(const shmq_map *map)
{
	return fail(SHMQ_CORRUPT,
	            "queue segment %llu: something has overwritten its header; delete the channel, or "
	            "stop the broker (what is on disk is kept)",
	            (unsigned long long)map->serial);
}

/* A sort key. */
static uint64_t by_body(const shmq_slot_desc *s)
{
	return s->body;
}

/* The words that decide over slots that were under way. */
typedef struct commit_words {
	uint64_t committed, disk_write, disk_read, deferred_write, deferred_read;
	bool adopting; /* the supervisor that was spilling is dead */
	shmq_broker *b;
} commit_words;

/* The commit word that decides over a MOVING slot: its own topic's, or that of the topic to which it
 * moves. A process that moves it holds D, so that word cannot change meanwhile. */
static uint64_t moves_committed(const commit_words *w, uint64_t word)
{
	uint32_t to = slot_moves_to(word);

	if (!to)
		return w->committed;
	return TRUST_CHECK(to <= topics_of(w->b)) ? ld(&w->b->topics[to - 1].committed)
	                                          : 0; /* SYNC(commit) */
}

/* The state that a rebuild gives a slot: the table of layout.h as code. PINNED stands for FREE
 * unless a view pins the slot. */
static unsigned resolved_state(shmq_map *map, shmq_slot_desc *s, const commit_words *w)
{
	unsigned state = SHMQ_STATE_OF(ld(&s->word));
	bool chunk = s->previous == SHMQ_DEFERRED, on_disk;

	switch (state) {
	case SHMQ_PREPARED:
		return s->order > w->committed ? SHMQ_FREE : slot_due(s) ? SHMQ_DEFERRED : SHMQ_READY;
	case SHMQ_READY:
		/* Another order: it was on its way to the requeue ring (shmq_stage_oldest). */
		return s->order < SHMQ_ORDER_FIRST ? SHMQ_READY : SHMQ_REQUEUED;
	case SHMQ_SPILLING:
		on_disk = chunk ? s->pos <= w->deferred_write : s->pos < w->disk_write;
		return on_disk ? SHMQ_PINNED : w->adopting ? previous_of(s) : SHMQ_SPILLING;
	case SHMQ_RESTORED:
		if (!chunk)
			return s->pos < w->disk_read ? SHMQ_REQUEUED : SHMQ_PINNED;
		return s->pos < w->deferred_read &&
		                       s->pos >> SHMQ_CHUNK_SHIFT == w->deferred_read >> SHMQ_CHUNK_SHIFT
					   ? SHMQ_DEFERRED
					   : SHMQ_PINNED;
	case SHMQ_MOVING:
		return slot_moved_seq(s) <= moves_committed(w, ld(&s->word)) ? SHMQ_PINNED : previous_of(s);
	case SHMQ_LEASED:
		return lease_resolve(map, s);
	case SHMQ_FREE:
	case SHMQ_LOANED:
	case SHMQ_IN_FLIGHT:
	case SHMQ_PINNED:
	case SHMQ_DEFERRED:
	case SHMQ_REQUEUED:
		return state;
	}
	return SHMQ_FREE; /* garbage */
}

/* Set the fields of a slot that becomes REQUEUED, if its state did not have them. */
static void fields_resolve(shmq_slot_desc *s, unsigned state)
{
	if (state == SHMQ_SPILLING && s->previous == SHMQ_IN_FLIGHT)
		s->order = slot_delivery_order(s);
	if (state == SHMQ_READY || (state == SHMQ_SPILLING && s->previous == SHMQ_IN_FLIGHT))
		s->after = 0;
	if (state == SHMQ_READY || state == SHMQ_SPILLING)
		s->pos = SHMQ_NO_POSITION;
}

/* Decide by the commit words every slot that was under way. */
static void resolve(shmq_broker *b, shmq_map *map, bool adopting)
{
	shmq_queue_desc *q = map->q;
	commit_words words = {.committed = ld(&topic_of(b, map)->committed), /* SYNC(commit) */
	                      .disk_write = ld(&q->disk_write),              /* SYNC(disk-write) */
	                      .disk_read = ld(&q->disk_read),                /* SYNC(disk-read) */
	                      .deferred_write = ld(&q->deferred_write),      /* SYNC(deferred-write) */
	                      .deferred_read = ld(&q->deferred_read),        /* SYNC(deferred-read) */
	                      .adopting = adopting,
	                      .b = b};
	uint32_t n = slots_of(map);

	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = &map->slots[i];
		uint64_t word = ld(&s->word); /* SYNC(slot-state) */
		unsigned next = resolved_state(map, s, &words);

		if (next == SHMQ_STATE_OF(word))
			continue;
		if (next == SHMQ_REQUEUED)
			fields_resolve(s, SHMQ_STATE_OF(word));
		st_release(&s->word, word_next(word, next)); /* SYNC(slot-state) */
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
		if (map->slots[i].pins) /* a store costs more than the look, and few are pinned */
			map->slots[i].pins = 0;
	for (uint32_t c = 0; c < clients; c++) {
		shmq_client_desc *client = &b->clients[c];
		uint32_t high = ld(&client->pins_high);

		for (uint32_t p = 0; p < high && p < SHMQ_PINS; p++) {
			uint64_t pin = ld(&client->pins[p]);

			uint32_t slot = pin & 0xffffff;

			if (slot < n && pin == pin_of(map->q->segment.serial, slot))
				map->slots[slot].pins++;
		}
	}
}

/* Take the body of a slot away whose words on it are garbage: the message stays, but nothing outside
 * of it is touched. */
static void body_forget(shmq_slot_desc *s)
{
	s->body = s->length = s->capacity = 0;
	s->flags &= (uint8_t)~SHMQ_SLOT_PROPERTIES;
}

/* Sort the first n entries of the free ring by the bodies of their slots, while nothing in the
 * queue's rings and heaps is of use any more. */
static void body_sort(shmq_map *map, uint32_t n)
{
	_Atomic uint32_t none = 0;
	heap unused = map->deferred;

	unused.length = &none;
	sort_slots(map, map->free, 0, n, by_body, &unused);
}

static void rebuild_arena(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = slots_of(map), mask = ring_mask_of(map), used = 0;
	uint64_t committed = arena_of(map);
	arena_cursor cursor = {0, 0};

	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = &map->slots[i];
		unsigned state = SHMQ_STATE_OF(ld(&s->word));

		if (state == SHMQ_FREE || (state == SHMQ_PINNED && !s->pins))
			s->capacity = 0; /* slots_list makes both FREE */
		else if (!s->capacity || s->length > s->capacity ||
		         !properties_can_be(s->flags, s->properties, s->length))
			body_forget(s);
		else
			map->free[used++ & mask] = i; /* the free ring is scratch space until it is filled */
	}
	body_sort(map, used);
	arena_reset(&q->arena);
	for (uint32_t i = 0; i < used; i++) {
		shmq_slot_desc *s = &map->slots[slot_in(map, &map->free[i])];

		prefetch(&map->slots[map->free[(i + AHEAD) & mask]]);
		if (!arena_claim(&q->arena, map->arena, committed, &cursor, s->body, s->capacity))
			body_forget(s); /* garbage, not a death */
	}
	arena_seal(&q->arena, map->arena, committed, &cursor);
}

/* How many slots a rebuild found in each ring and heap, and the counts derived from them. */
typedef struct counts {
	uint32_t ready, requeued, free, in_flight, deferred, leased, spilling, in_use;
	uint64_t in_use_bytes, order, ready_bytes;
	int64_t expiry;
} counts;

static void in_flight_list(shmq_map *map, uint32_t slot, counts *found)
{
	shmq_slot_desc *s = &map->slots[slot];
	shmq_session_desc *its = session_of(map, s);

	if (slot_delivery_order(s) > found->order)
		found->order = slot_delivery_order(s); /* a take died before it counted */
	map->in_flight.when[found->in_flight] = s->deadline;
	map->in_flight.slot[found->in_flight++] = slot;
	if (its)
		bump(&its->in_flight, 1);
}

/* Enter every slot in the ring or heap of its state, unsorted. */
static void slots_list(shmq_map *map, counts *found)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = slots_of(map), mask = ring_mask_of(map);
	uint32_t ready = ld(&q->ready_head), requeue = ld(&q->requeue_head), free = ld(&q->free_head);

	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = &map->slots[i];
		uint64_t word = ld(&s->word);

		s->heap = SHMQ_NONE;
		if (SHMQ_STATE_OF(word) != SHMQ_FREE && expiry_of(map, s) < found->expiry)
			found->expiry = expiry_of(map, s);
		switch (SHMQ_STATE_OF(word)) {
		case SHMQ_PINNED:
			if (s->pins)
				break;
			/* SYNC(slot-state) */
			st_release(&s->word, word_next(word, SHMQ_FREE));
			/* fall through */
		case SHMQ_FREE:
			map->free[(free + found->free++) & mask] = i;
			continue;
		case SHMQ_READY:
			map->ready[(ready + found->ready++) & mask] = i;
			found->ready_bytes += body_bytes(s);
			continue;
		case SHMQ_SPILLING:
			if (s->previous == SHMQ_DEFERRED)
				break; /* to a chunk: in use until it is on disk */
			found->spilling++;
			continue;
		case SHMQ_REQUEUED:
			map->requeue[(requeue + found->requeued++) & mask] = i;
			break;
		case SHMQ_IN_FLIGHT:
			in_flight_list(map, i, found);
			break;
		case SHMQ_DEFERRED:
			map->deferred.when[found->deferred] = slot_due(s);
			map->deferred.slot[found->deferred++] = i;
			break;
		case SHMQ_LEASED:
			found->leased++;
			break;
		default: /* LOANED: its owner has it; resolve leaves no other state */
			continue;
		}
		found->in_use++;
		found->in_use_bytes += block_bytes(s);
	}
}

/* Store the counts, and the rings' tails last. */
static void counts_store(shmq_map *map, const counts *found)
{
	shmq_queue_desc *q = map->q;
	uint32_t ready = ld(&q->ready_head), free = ld(&q->free_head);

	st(&q->order, found->order);
	st(&q->in_use, found->in_use);
	st(&q->in_use_bytes, found->in_use_bytes);
	st(&q->leased, found->leased);
	st(&q->ready_bytes_in, found->ready_bytes);
	st(&q->ready_bytes_out, 0);
	/* Messages that come later may expire sooner by the queue's own time to live: sweep soon. */
	st(&q->next_expiry, has_policy(map, SHMQ_POLICY_EXPIRY) ? 0 : found->expiry);
	st(&q->spilling_count, found->spilling);
	if (ld(&q->spilling) > 1) /* garbage */
		st(&q->spilling, found->spilling != 0);
	q->bodies_reclaimed_to = free + found->free;
	q->bodies_prepared_to = free;
	q->free_tail_cached = free + found->free;
	q->ready_head_cached = ready;
	q->ready_tail_cached = ready + found->ready;
	st_release(&q->free_tail, free + found->free); /* SYNC(free-tail) */
	st(&q->defer_head, ld(&q->defer_tail));
	st_release(&q->requeue_tail, ld(&q->requeue_head) + found->requeued); /* SYNC(requeue-head) */
	requeue_head_group_find(map);
	st_release(&q->ready_tail, ready + found->ready); /* SYNC(ready-tail) */
}

/* Rebuild rings, heaps and counts. */
static void rebuild_lists(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t sessions = sessions_of(map);
	counts found = {.order = ld(&q->order), .expiry = INT64_MAX};

	for (uint32_t i = 0; i < sessions; i++)
		st(&map->sessions[i].in_flight, 0);
	slots_list(map, &found);
	st(&q->in_flight_len, found.in_flight);
	st(&q->deferred_len, found.deferred);
	sort_slots(map, map->ready, ld(&q->ready_head), found.ready, by_order, &map->deferred);
	sort_slots(map, map->requeue, ld(&q->requeue_head), found.requeued, by_order, &map->deferred);
	SHMQ_KILLPOINT("rebuild.sorted");
	heap_make(&map->in_flight);
	heap_make(&map->deferred);
	counts_store(map, &found);
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
	/* The count of slots is never lowered: there may be messages after a smaller one. */
	if (!TRUST_CHECK(n - 1 < slots_of(map) && n >= ld(&map->slots_backed) &&
	                 !slots_behind(map, n) && arena_of(map) >= SHMQ_ARENA_FIRST))
		return queue_corrupt(map);
	for (mask = 0; mask < n - 1; mask = 2 * mask + 1)
		;
	st(&q->ring_mask, mask);
	derive_flags(b, map);
	resolve(b, map, adopting);
	recount_pins(b, map);
	SHMQ_KILLPOINT("rebuild.decided");
	rebuild_arena(map);
	SHMQ_KILLPOINT("rebuild.arena");
	rebuild_lists(map);
	st(&b->next_deadline[map->index], INT64_MAX);
	deadline_note(b, map);
	st(&b->next_due[map->index], due_first(map));
	scanner_ring(b, INT64_MAX, due_first(map));
	st(&q->need_bytes, 0);
	st(&q->need_slots, 0);
	SHMQ_KILLPOINT("rebuild.clear");
	st_release(&q->dirty, 0); /* SYNC(dirty) */
	wait_wake(b, &q->takers, WAKE_ALL);
	wait_wake(b, &q->space, WAKE_ALL);
	return 0;
}

/* Returns true if some process may go on reading the body: it is in flight, viewed, lent or
 * leased. */
static bool may_be_read(const shmq_slot_desc *s)
{
	unsigned state = SHMQ_STATE_OF(ld(&s->word));

	return state == SHMQ_IN_FLIGHT || state == SHMQ_LOANED || state == SHMQ_LEASED || s->pins;
}

/* Give back the bodies that nobody can go on reading. */
static void bodies_discard(shmq_map *map)
{
	uint32_t n = slots_of(map), mask = ring_mask_of(map), used = 0;
	uint64_t arena = (uint64_t)(map->arena - map->base), from = 0;

	/* The free ring is scratch space, because nobody will use this queue again. */
	for (uint32_t i = 0; i < n; i++)
		if (map->slots[i].capacity && may_be_read(&map->slots[i]) &&
		    body_is_in(map, &map->slots[i]))
			map->free[used++ & mask] = i;
	body_sort(map, used);
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

/* Give back the slots but those whose word says that a message is still its holder's. The word of a
 * slot that went is 0, which is no copy's. */
static void slots_discard(shmq_map *map)
{
	uint64_t slots = (uint64_t)((uint8_t *)map->slots - map->base), size = sizeof(shmq_slot_desc);
	uint32_t n = slots_of(map), from = 0;

	for (uint32_t i = 0; i < n; i++) {
		if (!may_be_read(&map->slots[i]))
			continue;
		segment_punch(map->base, slots + from * size, slots + i * size);
		from = i + 1;
	}
	segment_punch(map->base, slots + from * size, slots + map->slots_max * size);
}

void queue_discard(shmq_map *map)
{
	bodies_discard(map);
	slots_discard(map);
	/* All rings and heaps: they lie between the slots and the sessions. */
	segment_punch(map->base, (uint64_t)((uint8_t *)map->ready - map->base),
	              (uint64_t)((uint8_t *)map->sessions - map->base));
}

bool adds_up(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = slots_of(map), loaned = 0, leased = 0, unlisted = 0;
	uint64_t listed = (uint64_t)ring_count(&q->requeue_head, &q->requeue_tail) +
	                  ld(&q->in_flight_len) + ld(&q->deferred_len);
	uint64_t all = (uint64_t)ring_count(&q->ready_head, &q->ready_tail) + ld(&q->in_use) +
	               ring_count(&q->defer_head, &q->defer_tail) + ld(&q->spilling_count) +
	               ring_count(&q->free_head, &q->free_tail);
	uint64_t bytes = 0;

	if (!counts_are_sane(map))
		return false;
	if (all == n && listed + ld(&q->leased) == ld(&q->in_use) &&
	    ld(&q->in_use_bytes) <= bytes_budget(map))
		return true;
	/* Loans, views, leases, and chunks that are being written are in no list. */
	for (uint32_t i = 0; i < n; i++) {
		const shmq_slot_desc *s = &map->slots[i];
		unsigned state = SHMQ_STATE_OF(ld(&s->word));
		bool chunk = state == SHMQ_SPILLING && s->previous == SHMQ_DEFERRED;

		loaned += state == SHMQ_LOANED;
		leased += state == SHMQ_LEASED;
		unlisted += state == SHMQ_PINNED || chunk;
		if (state == SHMQ_PINNED || state == SHMQ_LEASED || chunk || state == SHMQ_REQUEUED ||
		    state == SHMQ_IN_FLIGHT || (state == SHMQ_DEFERRED && s->heap != SHMQ_NONE))
			bytes += block_bytes(s);
	}
	return all + loaned == n && listed + leased + unlisted == ld(&q->in_use) &&
	       leased == ld(&q->leased) && bytes == ld(&q->in_use_bytes);
}
