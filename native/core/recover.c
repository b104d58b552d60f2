/*
 * Locking P and D, and what happens when a holder died.
 *
 *   P died   topic.dirty = 1, lock made consistent; then each queue of the topic, with its D, is
 *            rebuilt; dirty cleared last. Every P locker does this first while it is set.
 *   D died   queue.dirty = 1, lock made consistent, D released; P and D are taken and the queue is
 *            rebuilt: never under D alone, because a publisher moves the other half meanwhile.
 *
 * A rebuild is idempotent and clears `dirty` last, so it may die anywhere. If it cannot finish (a
 * queue is not mapped yet, a lock is held by a stopped process) the locks stay usable, `dirty` set.
 */
#include "internal.h"

#include <poll.h>
#include <string.h>

static void deliver_died(shmq_map *map)
{
	if (!SHMQ_PLANTED(7))
		st(&map->q->dirty, 1);
	SHMQ_KILLPOINT("recover.deliver_dirty");
	lock_consistent(&map->q->deliver);
}

/* D, with a death noted but not repaired. */
static int deliver_take(shmq_map *map, int64_t until)
{
	int r = lock_take(&map->q->deliver, until);

	if (r == SHMQ_LOCK_DIED) {
		deliver_died(map);
		r = 0;
	}
	return r;
}

static bool closed(const shmq_map *map)
{
	return ld(&map->q->segment.ready) != SHMQ_READY_STATE;
}

void queue_unlock(shmq_map *map)
{
	lock_drop(&map->q->deliver);
}

static int queue_repair(shmq_broker *b, shmq_map *map)
{
	int r = queue_rebuild(b, map, false);

	if (!r)
		atomic_fetch_add(&b->d->rebuilt, 1);
	return r;
}

int queue_corrupt(const shmq_map *map)
{
	return because(SHMQ_CORRUPT,
	               "queue segment %llu: something has overwritten its header; delete the channel, or "
	               "stop the broker (what is on disk is kept)",
	               (unsigned long long)map->serial);
}

int queue_lock_under(shmq_broker *b, shmq_map *map, int64_t until)
{
	int r = deliver_take(map, until);

	if (r)
		return r;
	if (closed(map)) {
		queue_unlock(map);
		return SHMQ_GONE;
	}
	if (!ld(&map->q->dirty) && words_are_sane(map))
		return 0;
	r = queue_repair(b, map);
	if (r)
		queue_unlock(map);
	return r;
}

/* Every queue of a topic whose P holder died. P held. */
static int topic_recover(shmq_broker *b, shmq_topic_desc *t, int64_t until)
{
	uint32_t topic = (uint32_t)(t - b->topics), n = queues_of(b);

	for (uint32_t i = 0; i < n; i++) {
		shmq_map *map;
		int r;

		if (!entry_is(b, i, topic))
			continue;
		r = map_get(b, i, &map);
		if (r == SHMQ_GONE)
			continue;
		if (r)
			return r;
		r = deliver_take(map, until);
		if (!r) {
			(void)queue_repair(b, map); /* CORRUPT: it stays dirty, the others need not */
			queue_unlock(map);
		}
		map_release(map);
		if (r)
			return r;
		SHMQ_KILLPOINT("recover.topic_queue");
	}
	writer_recover(b, topic);
	/* It may have died between a queue's entry and this: everybody lists the queues anew. */
	atomic_fetch_add(&t->version, 1);
	st(&t->dirty, 0);
	return 0;
}

int topic_lock(shmq_broker *b, shmq_topic_desc *t, int64_t until)
{
	int r = lock_take(&t->publish, until);

	if (r == SHMQ_LOCK_DIED) {
		st(&t->dirty, 1);
		SHMQ_KILLPOINT("recover.topic_dirty");
		if (!SHMQ_PLANTED(8))
			lock_consistent(&t->publish);
		r = 0;
	}
	if (r)
		return r;
	if (ld(&t->dirty)) {
		r = topic_recover(b, t, until);
		if (r)
			topic_unlock(t);
	}
	return r;
}

void topic_unlock(shmq_topic_desc *t)
{
	lock_drop(&t->publish);
}

int queue_lock(shmq_broker *b, shmq_map *map, int64_t until)
{
	for (;;) {
		shmq_topic_desc *t;
		int r = deliver_take(map, until);

		if (r)
			return r;
		if (closed(map)) {
			queue_unlock(map);
			return SHMQ_GONE;
		}
		if (!ld(&map->q->dirty) && words_are_sane(map))
			return 0;
		queue_unlock(map);
		t = topic_of(b, map);
		r = topic_lock(b, t, until);
		if (r)
			return r;
		r = queue_lock_under(b, map, until);
		if (!r)
			queue_unlock(map);
		topic_unlock(t);
		if (r)
			return r;
	}
}

int both_lock(shmq_broker *b, shmq_map *map, int64_t until)
{
	shmq_topic_desc *t = topic_of(b, map);
	int r = topic_lock(b, t, until);

	if (r)
		return r;
	r = queue_lock_under(b, map, until);
	if (r)
		topic_unlock(t);
	return r;
}

void both_unlock(shmq_broker *b, shmq_map *map)
{
	queue_unlock(map);
	topic_unlock(topic_of(b, map));
}

/* ---- rebuild ---- */

int by_delivery(const shmq_slot_desc *x, const shmq_slot_desc *y)
{
	return x->move < y->move ? -1 : x->move > y->move;
}

int by_order(const shmq_slot_desc *x, const shmq_slot_desc *y)
{
	return x->order < y->order ? -1 : x->order > y->order;
}

static int by_body(const shmq_slot_desc *x, const shmq_slot_desc *y)
{
	return x->body < y->body ? -1 : x->body > y->body;
}

/* Heap sort of ring entries [base, base + n): in place, because nothing may be allocated here. */
void sort_slots(uint32_t *ring, uint32_t mask, uint32_t base, uint32_t n, const shmq_slot_desc *slots,
                int (*order)(const shmq_slot_desc *, const shmq_slot_desc *))
{
#define AT(i) ring[(base + (i)) & mask]
	uint32_t i;

	for (i = 1; i < n && order(&slots[AT(i - 1)], &slots[AT(i)]) <= 0; i++)
		;
	if (i >= n)
		return; /* mostly they are */
	for (uint32_t start = n / 2, end = n; end > 1;) {
		uint32_t root, child, x;

		if (start) {
			x = AT(--start);
		} else {
			x = AT(--end);
			AT(end) = AT(0);
		}
		for (root = start; (child = 2 * root + 1) < end; root = child) {
			if (child + 1 < end && order(&slots[AT(child)], &slots[AT(child + 1)]) < 0)
				child++;
			if (order(&slots[x], &slots[AT(child)]) >= 0)
				break;
			AT(root) = AT(child);
		}
		AT(root) = x;
	}
#undef AT
}

/* Decide what was under way, by the commit words. */
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

/* Pins are what the clients' logs say. */
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

/* Rings, heaps and counts. */
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

int shmq_rebuild(shmq_broker *b, uint32_t queue, int64_t until)
{
	shmq_map *map;
	int r = map_get(b, queue, &map);

	if (r)
		return r;
	r = both_lock(b, map, until);
	if (!r) {
		r = queue_rebuild(b, map, false);
		both_unlock(b, map);
	}
	map_release(map);
	return r;
}

/* ---- memory given back ---- */

/*
 *   give back   dirty, arena_committed lowered to where the last body ends, rebuild (which clears
 *               dirty), the pages behind it punched
 * Bodies of slots in use are where they were, and below the new end. A death before the store leaves
 * nothing to repair but `dirty`, one after it a smaller arena with pages behind it that the next call
 * gives back. Who finds the arena too small grows it as at first, and looks at each page then: that
 * its process once had pages there (arena_backed) says nothing any more.
 */

/* Where the last body of a slot in use ends, as a size of the arena. */
static uint64_t arena_needed(shmq_map *map)
{
	uint32_t n = slots_of(map);
	uint64_t end = 0, page = round_page(1);

	for (uint32_t i = 0; i < n; i++) {
		const shmq_slot_desc *s = &map->slots[i];
		uint64_t last = s->body + s->capacity;

		if (SHMQ_STATE_OF(ld(&s->word)) != SHMQ_FREE && s->capacity && last > end)
			end = last;
	}
	if (!end)
		return SHMQ_ARENA_FIRST;
	end = (end + SHMQ_ARENA_UNIT + page - 1) / page * page; /* the sentinel is behind it */
	return end > SHMQ_ARENA_FIRST ? end : SHMQ_ARENA_FIRST;
}

int shmq_give_back(shmq_broker *b, uint32_t queue, int64_t until, uint64_t *bytes)
{
	uint64_t had, keep, arena;
	shmq_map *map;
	int r = map_get(b, queue, &map);

	*bytes = 0;
	if (r)
		return r;
	r = both_lock(b, map, until);
	if (r)
		goto out;
	had = arena_of(map);
	keep = arena_needed(map);
	arena = (uint64_t)(map->arena - map->base);
	if (keep < had) {
		st(&map->q->dirty, 1);
		SHMQ_KILLPOINT("give_back.dirty");
		st_release(&map->q->arena_committed, keep);
		SHMQ_KILLPOINT("give_back.lowered");
		r = queue_rebuild(b, map, false);
		*bytes = had - keep;
	}
	if (!r) {
		st(&map->arena_backed, keep);
		segment_punch(map->base, arena + (keep < had ? keep : had), arena + map->arena_max);
		SHMQ_KILLPOINT("give_back.punched");
	}
	both_unlock(b, map);
out:
	map_release(map);
	return r;
}

/* Who has a message may go on reading it: in flight, viewed, lent, leased. */
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

/* Is every slot somewhere, and what is held counted? P and D held. */
static bool adds_up(shmq_map *map)
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
	/* Loans, views, leases and chunks that are being written are in no list. */
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

int shmq_audit(shmq_broker *b, uint32_t queue, int64_t until, bool *repaired)
{
	shmq_map *map;
	int r = map_get(b, queue, &map);

	*repaired = false;
	if (r)
		return r;
	touch(b, queue);
	r = both_lock(b, map, until);
	if (!r) {
		*repaired = !adds_up(map);
		if (*repaired)
			r = queue_repair(b, map);
		both_unlock(b, map);
	}
	map_release(map);
	return r;
}

int shmq_adopt(shmq_broker *b, uint32_t queue, int64_t until)
{
	shmq_map *map;
	int r = map_get(b, queue, &map);

	if (r)
		return r;
	r = both_lock(b, map, until);
	if (!r) {
		r = queue_rebuild(b, map, true);
		both_unlock(b, map);
	}
	map_release(map);
	return r;
}

/* ---- reaper ---- */

#define ALONE 3 /* times as long a pause while nobody else is attached */

/* How many locks there were to try. */
static uint32_t reap_scan(shmq_broker *b, shmq_dead *out, uint32_t n, uint32_t *found)
{
	uint32_t clients = clients_of(b), tried = 0;

	*found = 0;
	for (uint32_t i = 0; i < clients && *found < n; i++) {
		shmq_client_desc *c = &b->clients[i];
		int r;

		if (ld_acquire(&c->state) != SHMQ_CLIENT_LIVE || ld(&c->orphan) ||
		    (b->attached && i == b->client))
			continue;
		tried++;
		r = lock_take(&c->life, 0);
		if (r && r != SHMQ_LOCK_DIED)
			continue;
		if (r)
			lock_consistent(&c->life);
		lock_drop(&c->life);
		if (ld_acquire(&c->state) != SHMQ_CLIENT_LIVE)
			continue; /* it detached just now */
		out[(*found)++] = (shmq_dead){.client = i,
		                              .generation = ld(&c->generation),
		                              .pid = c->pid,
		                              .start_time = c->start_time,
		                              .program = c->program};
	}
	return tried;
}

int shmq_reap_scan(shmq_broker *b, shmq_dead *out, uint32_t n, uint32_t *found)
{
	(void)reap_scan(b, out, n, found);
	return 0;
}

int shmq_reap_wait(shmq_broker *b, int fd, int64_t every, int64_t until, shmq_dead *out, uint32_t n,
                   uint32_t *found)
{
	struct pollfd ended = {.fd = fd, .events = POLLIN};

	for (;;) {
		/* Who attaches next and dies at once will have held no more for long. */
		int64_t pause = reap_scan(b, out, n, found) ? every : ALONE * every;
		int64_t left = until - now_ns();
		struct timespec t;

		if (*found || left <= 0)
			return 0;
		t = timespec_of(left < pause ? left : pause);
		if (ppoll(&ended, 1, &t, NULL))
			return 0;
	}
}

void shmq_reap_spare(shmq_broker *b, uint32_t client, uint32_t generation)
{
	if (client < SHMQ_CLIENTS && ld(&b->clients[client].generation) == generation)
		st(&b->clients[client].orphan, 1);
}

/* What a client holds of one queue. */
static int reap_queue(shmq_broker *b, uint32_t queue, uint32_t client, int64_t until,
                      uint32_t *returned)
{
	shmq_topic_desc *t;
	shmq_map *map;
	int r = map_get(b, queue, &map);

	/* Another queue has the index of one that is gone; who detaches and never mapped it holds
	 * nothing of it. */
	if (r == SHMQ_NEED_MAP && b->attached && client == b->client)
		return 0;
	if (r)
		return r == SHMQ_GONE ? 0 : r;
	/* P first, only to repair what it may have left; not held on, so that no traffic waits. */
	t = topic_of(b, map);
	r = topic_lock(b, t, until);
	if (!r) {
		topic_unlock(t);
		r = queue_lock(b, map, until);
	}
	if (!r) {
		*returned += queue_return(b, map, client, SHMQ_NONE);
		for (uint32_t i = 0; i < waiters_of(b); i++)
			if ((uint32_t)ld(&b->waiters[i].owner) == client + 1) {
				wait_withdraw(&map->q->takers, i);
				wait_withdraw(&map->q->space, i);
			}
		queue_unlock(map);
		wake_takers(b, map, WAKE_ALL);
		wait_wake(b, &map->q->space, WAKE_ALL);
		spiller_ring(b, queue); /* it may have died before it rang */
	}
	map_release(map);
	/* Of a queue that cannot be repaired nothing can be given back; of the others it must. */
	return r == SHMQ_GONE || r == SHMQ_CORRUPT ? 0 : r;
}

int shmq_reap(shmq_broker *b, uint32_t client, uint32_t generation, int64_t until,
              uint32_t *returned)
{
	shmq_client_desc *c = &b->clients[client];

	*returned = 0;
	if (client >= clients_of(b) || ld(&c->generation) != generation ||
	    ld(&c->state) != SHMQ_CLIENT_LIVE)
		return SHMQ_GONE;
	for (uint32_t word = 0; word < SHMQ_QUEUES / 64; word++) {
		uint64_t bits;

		while ((bits = ld(&c->touched[word]))) {
			uint32_t queue = word * 64 + (uint32_t)__builtin_ctzll(bits);
			int r = reap_queue(b, queue, client, until, returned);

			if (r)
				return r;
			SHMQ_KILLPOINT("reap.queue");
			atomic_fetch_and(&c->touched[word], ~(bits & -bits));
		}
	}
	for (uint32_t i = 0; i < SHMQ_PINS; i++)
		st(&c->pins[i], 0); /* of queues that are gone */
	st(&c->pins_high, 0);
	for (uint32_t i = 0; i < SHMQ_REQUESTS; i++) {
		uint32_t state = ld(&b->requests[i].state);

		if (b->requests[i].client != client)
			continue;
		if (state == SHMQ_REQUEST_POSTED)
			atomic_compare_exchange_strong(&b->requests[i].state, &state,
			                               SHMQ_REQUEST_ABANDONED);
		if (state == SHMQ_REQUEST_DONE)
			st_release(&b->requests[i].state, SHMQ_REQUEST_FREE);
	}
	/* It may have died between clearing a waiter's bit and posting, or before it rang for what it
	 * had changed: everybody looks again. */
	supervisor_ring(b, RING_REQUEST | RING_SPILLER | RING_LEFT | RING_CHANGED | RING_DEADLINE);
	for (uint32_t i = 0; i < waiters_of(b); i++)
		if (ld(&b->waiters[i].owner) && !SHMQ_PLANTED(10))
			bell_ring(b, i);
	for (uint32_t i = 0; i < waiters_of(b); i++)
		if ((uint32_t)ld(&b->waiters[i].owner) == client + 1) {
			sem_destroy(&b->waiters[i].bell);
			sem_init(&b->waiters[i].bell, 1, 0);
			st_release(&b->waiters[i].owner, 0);
		}
	SHMQ_KILLPOINT("reap.entry");
	atomic_fetch_add(&c->generation, 1);
	bump(&b->d->reaped, 1);
	st_release(&c->state, SHMQ_CLIENT_FREE);
	return 0;
}
