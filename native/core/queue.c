/*
 * One bounded queue, the consumer's side: take, finish, requeue, touch, expire, pins, sessions.
 * Everything here is under D; nothing here looks at what P owns but the tails and `committed`.
 *
 * Order of stores, so that a death is repaired by a rebuild from the state words:
 *   out of the queue   fields, state word, ring head, heap
 *   finish             state word, heap, ring entry, ring tail
 *   back into it       order counter, fields, state word, heap, ring entry, ring tail
 * A death with D held sets `dirty` (recover.c), so between the state word and the rest anything may
 * be missing.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

bool queue_is_empty(shmq_queue_desc *q)
{
	/* ready before requeue: on its way from the one to the other a message is in both */
	return !ring_count(&q->ready_head, &q->ready_tail) &&
	       !ring_count(&q->requeue_head, &q->requeue_tail) &&
	       !ring_count(&q->defer_head, &q->defer_tail) && !ld(&q->held) && !ld(&q->spilling_count) &&
	       !on_disk(q);
}

/* Whole blocks count, not bodies: a small message may have got the large block of an earlier one. */
void held_add(shmq_map *map, uint32_t slot)
{
	bump(&map->q->held, 1);
	bump(&map->q->held_bytes, block_bytes(&map->slots[slot]));
}

void held_remove(shmq_map *map, uint32_t slot)
{
	st(&map->q->held, ld(&map->q->held) - 1);
	st(&map->q->held_bytes, ld(&map->q->held_bytes) - block_bytes(&map->slots[slot]));
}

static void free_push(shmq_map *map, uint32_t slot)
{
	uint32_t tail = ld(&map->q->free_tail);

	map->free[tail & ring_mask_of(map)] = slot;
	SHMQ_KILLPOINT("release.ring");
	st_release(&map->q->free_tail, tail + 1);
}

/* SYNC(slot-free): the state is stored before the free ring's tail; queue_room reads it after. */
void slot_release(shmq_map *map, uint32_t slot)
{
	shmq_slot_desc *s = &map->slots[slot];
	uint64_t word = ld(&s->word);

	if (s->pins) {
		st_release(&s->word, word_next(word, SHMQ_DONE));
		held_add(map, slot);
		return;
	}
	st_release(&s->word, word_next(word, SHMQ_FREE));
	SHMQ_KILLPOINT("release.free");
	free_push(map, slot);
}

void slot_back(shmq_map *map, uint32_t slot, uint64_t after)
{
	shmq_queue_desc *q = map->q;
	shmq_slot_desc *s = &map->slots[slot];
	uint64_t order = ld(&q->order) + 1;
	uint32_t tail = ld(&q->requeue_tail);

	st(&q->order, order);
	s->order = order;
	s->after = after;
	s->pos = SHMQ_NO_POSITION;
	SHMQ_KILLPOINT("back.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_BACK));
	SHMQ_KILLPOINT("back.state");
	map->requeue[tail & ring_mask_of(map)] = slot;
	SHMQ_KILLPOINT("back.ring");
	if (!after)
		q->requeue_firsts = tail + 1;
	st_release(&q->requeue_tail, tail + 1);
}

void requeue_firsts_find(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->requeue_head), at = ld(&q->requeue_tail);

	if (!SANE(at - head <= slots_of(map))) {
		queue_broken(map);
		return;
	}
	for (; at != head; at--) {
		uint32_t slot = map->requeue[(at - 1) & ring_mask_of(map)];

		if (!slot_is(map, slot, SHMQ_BACK)) {
			queue_broken(map);
			break;
		}
		if (!map->slots[slot].after)
			break;
	}
	q->requeue_firsts = at;
}

void deadline_note(shmq_broker *b, shmq_map *map)
{
	int64_t first = heap_first(&map->inflight), leases = lease_deadline(map);

	if (leases < first)
		first = leases;
	if (first < ld(&b->next_deadline[map->index])) {
		st(&b->next_deadline[map->index], first);
		scanner_ring(b, first, INT64_MAX);
	}
}

void due_note(shmq_broker *b, uint32_t index, int64_t due)
{
	int64_t have = ld(&b->next_due[index]);

	while (due < have)
		if (atomic_compare_exchange_weak(&b->next_due[index], &have, due)) {
			scanner_ring(b, INT64_MAX, due);
			return;
		}
}

/* Deferred publishes come through a ring of their own, so that they never wait behind the disk. */
void defer_drain(shmq_broker *b, shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->defer_head), tail = ld_acquire(&q->defer_tail);

	if (head == tail)
		return;
	for (; head != tail; head++) {
		uint32_t slot = map->defer[head & ring_mask_of(map)];

		if (!slot_is(map, slot, SHMQ_DEFERRED)) {
			queue_broken(map);
			return;
		}
		heap_push(&map->deferred, map->slots[slot].deadline, slot);
		held_add(map, slot);
		SHMQ_KILLPOINT("defer.heap");
		st_release(&q->defer_head, head + 1);
	}
	due_note(b, map->index, heap_first(&map->deferred));
}

void wake_takers(shmq_broker *b, shmq_map *map, uint32_t n)
{
	wait_wake(b, &map->q->takers, n);
}

void spiller_tell(shmq_broker *b, shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t waiting = ld(&q->requeue_tail) - ld(&q->requeue_head);

	if ((ld(&q->disk_read) != ld(&q->disk_write) && waiting < map->low_water) || defers_many(map))
		spiller_ring(b, map->index);
}

/* A publisher that waits is woken when a quarter of the room is free, so that a full queue does not
 * cost a wake-up a message; it looks by itself every 10 ms, so a slow consumer costs no more. */
void wake_space(shmq_broker *b, shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t budget, ready;

	fence_unlocked();
	spiller_tell(b, map);
	if (!ld(&q->space.summary))
		return;
	budget = ready_budget(map);
	ready = ring_count(&q->ready_head, &q->ready_tail) + ld(&q->spilling_count);
	if (ready <= budget - budget / 4)
		wait_wake(b, &q->space, WAKE_ALL);
}

/* ---- sessions ---- */

static int session_open(shmq_broker *b, shmq_map *map, uint32_t max_in_flight, uint32_t *session)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = sessions_of(map), more = n ? 2 * n : SHMQ_SESSIONS_FIRST, i;
	shmq_session_desc *s;

	for (i = 0; i < n; i++)
		if (!ld(&map->sessions[i].client))
			break;
	if (i == n) {
		int r = n == SHMQ_SESSIONS
		                ? because(SHMQ_TABLE_FULL, "the channel has %u consumers already", n)
		        : n < ld(&q->sessions_committed)
		                ? queue_corrupt(map)
		                : segment_commit(map->base, (uint64_t)((uint8_t *)map->sessions - map->base),
		                                more * sizeof(*s));

		if (r)
			return r;
		st(&q->sessions_committed, more < SHMQ_SESSIONS ? more : SHMQ_SESSIONS);
	}
	s = &map->sessions[i];
	memset((char *)s + sizeof(s->client), 0, sizeof(*s) - sizeof(s->client));
	s->generation = b->client_generation;
	s->max_in_flight = max_in_flight;
	s->since = realtime_ns();
	st_release(&s->client, b->client + 1);
	*session = i;
	return 0;
}

/* The pins of a client on this queue: log and counts. */
static void unpin_all(shmq_broker *b, shmq_map *map, uint32_t client)
{
	shmq_client_desc *c = &b->clients[client];

	for (uint32_t p = 0; p < SHMQ_PINS && p < ld(&c->pins_high); p++) {
		uint64_t pin = ld(&c->pins[p]);
		uint32_t slot = pin & 0xffffff;
		shmq_slot_desc *s = &map->slots[slot];

		if (pin >> 24 != map->serial || slot >= slots_of(map))
			continue;
		if (s->pins && !--s->pins && SHMQ_STATE_OF(ld(&s->word)) == SHMQ_DONE) {
			held_remove(map, slot);
			slot_release(map, slot);
		}
		st(&c->pins[p], 0);
	}
}

uint32_t queue_return(shmq_broker *b, shmq_map *map, uint32_t client, uint32_t session)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = slots_of(map), mask = ring_mask_of(map), tail = ld(&q->requeue_tail);
	uint32_t found = 0, sessions = sessions_of(map);

	/* The requeue ring behind its tail is scratch space: collect, put in order of delivery. */
	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = &map->slots[i];
		uint64_t word = ld(&s->word);

		if (SHMQ_OWNER_OF(word) != client)
			continue;
		if (SHMQ_STATE_OF(word) == SHMQ_INFLIGHT &&
		    (session == SHMQ_NONE || s->session == session))
			map->requeue[(tail + found++) & mask] = i;
		if (SHMQ_STATE_OF(word) == SHMQ_LOANED && session == SHMQ_NONE)
			slot_release(map, i);
	}
	sort_slots(map->requeue, mask, tail, found, map->slots, by_delivery);
	for (uint32_t i = 0; i < found; i++) {
		uint32_t slot = slot_in(map, &map->requeue[(tail + i) & mask]);
		shmq_session_desc *its = session_of(map, &map->slots[slot]);

		if (its)
			session_leave(its);
		slot_back(map, slot, 0);
		heap_remove(&map->inflight, slot);
		SHMQ_KILLPOINT("return.slot");
	}
	for (uint32_t i = 0; i < sessions; i++)
		if (ld(&map->sessions[i].client) == client + 1 &&
		    (session == SHMQ_NONE || i == session))
			st_release(&map->sessions[i].client, 0);
	if (session == SHMQ_NONE) {
		unpin_all(b, map, client);
		lease_orphan(b, map, client);
	}
	bump(&q->returned, found);
	return found;
}

int shmq_consumer_open(shmq_broker *b, uint32_t queue, uint64_t serial, uint32_t max_in_flight,
                       int64_t msg_timeout_ns, int64_t until, shmq_consumer **out)
{
	shmq_consumer *c;
	shmq_map *map;
	int r = usable_status(b);

	if (!r)
		r = map_get_serial(b, queue, serial, &map);
	if (r)
		return r;
	c = calloc(1, sizeof(*c));
	if (!c) {
		map_release(map);
		return SHMQ_NO_MEMORY;
	}
	touch(b, queue);
	r = queue_lock(b, map, until);
	if (!r) {
		r = session_open(b, map, max_in_flight, &c->session);
		queue_unlock(map);
	}
	if (r) {
		map_release(map);
		free(c);
		return r;
	}
	broker_hold(b);
	c->b = b;
	c->map = map;
	st(&c->max_in_flight, max_in_flight);
	c->msg_timeout = msg_timeout_ns < 0    ? INT64_MAX
	                 : msg_timeout_ns == 0 ? b->d->limits.msg_timeout
	                                       : msg_timeout_ns;
	*out = c;
	return 0;
}

static int consumer_status(const shmq_consumer *c)
{
	int r = usable_status(c->b);

	return r ? r : ld(&c->closed) ? SHMQ_CLOSED : 0;
}

int shmq_consumer_close(shmq_consumer *c, int64_t until)
{
	uint32_t returned;
	int r;

	if (consumer_status(c)) {
		st(&c->closed, true);
		return 0;
	}
	r = queue_lock(c->b, c->map, until);
	if (r == SHMQ_GONE) {
		st(&c->closed, true);
		return 0;
	}
	if (r)
		return r;
	returned = queue_return(c->b, c->map, c->b->client, c->session);
	st(&c->closed, true);
	queue_unlock(c->map);
	/* Who leaves and leaves messages wakes the next. */
	if (returned || ring_count(&c->map->q->ready_head, &c->map->q->ready_tail))
		wake_takers(c->b, c->map, returned + 1);
	if (c->map->q->flags & SHMQ_FLAG_EPHEMERAL)
		supervisor_ring(c->b, RING_LEFT);
	shmq_consumer_wake(c);
	return 0;
}

void shmq_consumer_free(shmq_consumer *c)
{
	shmq_broker *b = c->b;

	map_put(c->b, c->map);
	free(c);
	broker_release(b);
}

/* ---- take ---- */

/* Nothing is to be taken from a ring that names what is not in its state, or has no body. */
static bool may_be_taken(shmq_map *map, uint32_t slot, unsigned state, span *at)
{
	if (slot_is(map, slot, state) && body_in(map, &map->slots[slot], at))
		return true;
	queue_broken(map);
	return false;
}

bool queue_next(shmq_map *map, uint32_t *slot, _Atomic uint32_t **head, span *at)
{
	shmq_queue_desc *q = map->q;
	uint32_t back = ld(&q->requeue_head), ready = ld(&q->ready_head), mask = ring_mask_of(map);
	uint32_t first;
	bool have_ready;

	if ((int32_t)(q->ready_tail_seen - ready) <= 0) /* a spill may have passed it */
		q->ready_tail_seen = ld_acquire(&q->ready_tail);
	have_ready = ready != q->ready_tail_seen && !on_disk(q);
	first = have_ready ? once(map->ready[ready & mask]) : SHMQ_NONE;

	if (back != ld(&q->requeue_tail)) {
		uint64_t after;

		*slot = once(map->requeue[back & mask]);
		*head = &q->requeue_head;
		if (!may_be_taken(map, *slot, SHMQ_BACK, at))
			return false;
		/* A requeued message waits for what was published before it came back. But not if that
		 * may not be taken: it is held already, and would wait for ever for itself. And not if
		 * behind it are some that go first: what is READY was published after them. */
		after = map->slots[*slot].after;
		if (!have_ready || !after || (int32_t)(q->requeue_firsts - back) > 0 || !may_hold_more(map))
			return true;
		if (!slot_is(map, first, SHMQ_READY)) {
			queue_broken(map);
			return false;
		}
		if (map->slots[first].order >= after)
			return true;
	}
	*slot = first;
	*head = &q->ready_head;
	if (have_ready && may_hold_more(map))
		return may_be_taken(map, first, SHMQ_READY, at);
	if (have_ready && !counts_are_sane(map))
		queue_broken(map);
	return false;
}

/* D held. */
static uint32_t take_some(shmq_consumer *c, shmq_message *out, uint32_t n, uint64_t max_bytes,
                          bool *more)
{
	shmq_map *map = c->map;
	shmq_queue_desc *q = map->q;
	shmq_session_desc *session = &map->sessions[c->session];
	uint32_t taken = 0, slot, left;
	_Atomic uint32_t *head;
	int64_t now, deadline;
	uint64_t order, bytes = 0;
	span at;

	if (ld(&q->defer_head) != ld_acquire(&q->defer_tail))
		defer_drain(c->b, map);
	left = ld(&session->in_flight);
	left = left < ld(&c->max_in_flight) ? ld(&c->max_in_flight) - left : 0;
	if (n > left)
		n = left;
	if (ld(&q->paused))
		n = 0;
	if (!n)
		return 0;
	now = now_coarse_ns();
	deadline = later(now, c->msg_timeout);
	order = ld(&q->order);
	while (taken < n && bytes < max_bytes && queue_next(map, &slot, &head, &at)) {
		shmq_slot_desc *s = &map->slots[slot];
		uint64_t word;

		word = SHMQ_WORD(SHMQ_INFLIGHT, c->b->client, SHMQ_GENERATION_OF(ld(&s->word)) + 1);
		s->deadline = deadline;
		s->delivered = now;
		s->session = c->session;
		s->move = ++order;
		SHMQ_KILLPOINT("take.fields");
		st_release(&s->word, word);
		SHMQ_KILLPOINT("take.state");
		st_release(head, ld(head) + 1);
		SHMQ_KILLPOINT("take.head");
		/* Who dies before this has handed nothing out: a delivery nobody saw is not counted. */
		s->attempts++;
		heap_push(&map->inflight, deadline, slot);
		SHMQ_KILLPOINT("take.heap");
		if (head == &q->ready_head)
			held_add(map, slot);
		out[taken++] = (shmq_message){.word = word,
		                              .id = s->id,
		                              .timestamp = s->timestamp,
		                              .body = map->arena + at.body,
		                              .length = at.length,
		                              .slot = slot,
		                              .attempts = s->attempts};
		bytes += at.length;
	}
	if (!taken)
		return 0;
	*more = queue_next(map, &slot, &head, &at);
	st(&q->order, order);
	bump(&session->in_flight, taken);
	session->delivered += taken;
	bump(&q->delivered, taken);
	deadline_note(c->b, map);
	return taken;
}

int shmq_take_bytes(shmq_consumer *c, shmq_message *out, uint32_t n, uint64_t max_bytes,
                    int64_t until, uint32_t *got)
{
	shmq_map *map = c->map;
	shmq_queue_desc *q = map->q;
	uint32_t taken = 0;
	bool more = false;
	int r = consumer_status(c);

	if (r)
		return r;
	for (bool repaired = false;; repaired = true) {
		bool broken;

		r = queue_lock(c->b, map, until);
		if (r)
			return r;
		taken = take_some(c, out, n, max_bytes, &more);
		broken = !taken && ld(&q->dirty);
		queue_unlock(map);
		if (!broken)
			break;
		if (repaired)
			return queue_corrupt(map);
	}
	if (!taken) {
		spiller_tell(c->b, map); /* who had to may have died before */
		return SHMQ_EMPTY;
	}
	wake_space(c->b, map);
	if (more && ld(&q->takers.summary))
		wake_takers(c->b, map, 1);
	*got = taken;
	return 0;
}

int shmq_take(shmq_consumer *c, shmq_message *out, uint32_t n, int64_t until, uint32_t *got)
{
	return shmq_take_bytes(c, out, n, UINT64_MAX, until, got);
}

void shmq_consumer_limit(shmq_consumer *c, uint32_t max_in_flight)
{
	st(&c->max_in_flight, max_in_flight);
	if (!consumer_status(c))
		c->map->sessions[c->session].max_in_flight = max_in_flight; /* for who looks */
}

bool shmq_message_held(shmq_consumer *c, const shmq_message *m)
{
	fence_acquire();
	return ld(&c->map->slots[m->slot].word) == m->word;
}

bool may_take(shmq_consumer *c)
{
	shmq_queue_desc *q = c->map->q;

	if (ld(&c->closed) || ld(&q->segment.ready) != SHMQ_READY_STATE || ld(&q->dirty))
		return true;
	if (ld(&q->paused) || ld(&c->map->sessions[c->session].in_flight) >= ld(&c->max_in_flight))
		return false;
	if (ld(&q->requeue_head) != ld(&q->requeue_tail))
		return true;
	return ld(&q->ready_head) != ld_acquire(&q->ready_tail) && !on_disk(q) && may_hold_more(c->map);
}

bool consumer_enter(shmq_consumer *c, uint32_t bell)
{
	for (uint32_t i = 0; i < CONSUMER_BELLS; i++) {
		uint32_t nobody = 0;

		if (atomic_compare_exchange_strong(&c->waiting[i], &nobody, bell + 1))
			return true;
	}
	return false;
}

void consumer_leave(shmq_consumer *c, uint32_t bell)
{
	for (uint32_t i = 0; i < CONSUMER_BELLS; i++)
		if (ld(&c->waiting[i]) == bell + 1)
			st(&c->waiting[i], 0);
}

int shmq_consumer_wait(shmq_consumer *c, int64_t deadline)
{
	shmq_queue_desc *q = c->map->q;
	uint32_t bell;
	bool slept = false;
	int r = consumer_status(c);

	if (r)
		return r;
	if (bell_get(c->b, &bell)) { /* more waiters than the table has: poll */
		struct timespec t = timespec_of(2 * NS_PER_MS);

		if (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL))
			return SHMQ_INTERRUPTED;
		return now_ns() < deadline ? 0 : SHMQ_TIMEOUT;
	}
	(void)consumer_enter(c, bell); /* without a place it looks after 1 s */
	wait_announce(&q->takers, bell);
	SHMQ_KILLPOINT("wait.announced");
	if (!may_take(c))
		r = bell_wait(c->b, bell, deadline, NS_PER_S, &slept);
	if (slept && !r)
		bell_gathered(ring_count(&q->ready_head, &q->ready_tail));
	wait_withdraw(&q->takers, bell);
	consumer_leave(c, bell);
	bell_put(c->b, bell);
	if (r && may_take(c))
		wake_takers(c->b, c->map, 1); /* a ring meant for us must not be lost with us */
	return r;
}

void shmq_consumer_wake(shmq_consumer *c)
{
	for (uint32_t i = 0; i < CONSUMER_BELLS; i++) {
		uint32_t bell = ld(&c->waiting[i]);

		if (bell)
			bell_ring(c->b, bell - 1);
	}
}

void shmq_consumer_pass(shmq_consumer *c)
{
	if (!consumer_status(c) && may_take(c))
		wake_takers(c->b, c->map, 1);
}

/* ---- finish, requeue, touch ---- */

static shmq_slot_desc *in_flight(shmq_consumer *c, const shmq_message *m)
{
	shmq_slot_desc *s;

	if (m->slot >= slots_of(c->map))
		return NULL;
	s = &c->map->slots[m->slot];
	return ld(&s->word) == m->word ? s : NULL;
}

static void session_settle(shmq_consumer *c, shmq_slot_desc *s)
{
	shmq_session_desc *its = session_of(c->map, s);

	if (its)
		session_leave(its);
}

/* One lock for many: what `each` does to a slot that is in flight to us. D is held afterwards if it
 * returns 0 or SHMQ_NOT_IN_FLIGHT. */
static int settle(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until,
                  void (*each)(shmq_consumer *, shmq_slot_desc *, uint32_t, int64_t),
                  int64_t argument, uint32_t *done)
{
	int r = consumer_status(c);

	*done = 0;
	if (!r)
		r = queue_lock(c->b, c->map, until);
	if (r && ok)
		memset(ok, 0, n);
	if (r)
		return r;
	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = in_flight(c, &m[i]);

		if (ok)
			ok[i] = s != NULL;
		if (!s)
			continue;
		++*done;
		each(c, s, m[i].slot, argument);
	}
	return *done == n ? 0 : SHMQ_NOT_IN_FLIGHT;
}

static bool locked_after(int r)
{
	return r == 0 || r == SHMQ_NOT_IN_FLIGHT;
}

/* What a closed consumer had is not in flight to it any more. */
static int not_settled(int r)
{
	return r == SHMQ_CLOSED ? SHMQ_NOT_IN_FLIGHT : r;
}

static void finish_one(shmq_consumer *c, shmq_slot_desc *s, uint32_t slot, int64_t realtime)
{
	shmq_map *map = c->map;
	uint64_t word = ld(&s->word);
	unsigned next = s->pins ? SHMQ_DONE : SHMQ_FREE;

	st_release(&s->word, word_next(word, next));
	SHMQ_KILLPOINT("finish.state");
	latency_record(map->latency, s->timestamp, realtime);
	heap_remove(&map->inflight, slot);
	SHMQ_KILLPOINT("finish.heap");
	session_settle(c, s);
	if (next == SHMQ_FREE) {
		held_remove(map, slot);
		free_push(map, slot);
	}
}

int shmq_finish(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until)
{
	shmq_session_desc *session = &c->map->sessions[c->session];
	shmq_queue_desc *q = c->map->q;
	int64_t realtime = realtime_ns();
	uint32_t done;
	bool limited;
	int r;

	r = settle(c, m, n, ok, until, finish_one, realtime, &done);
	if (!locked_after(r))
		return not_settled(r);
	latency_turn(c->map->latency, realtime);
	session->finished += done;
	bump(&q->finished, done);
	/* Somebody may wait not for messages but for this: his own limit, or the queue's. */
	limited = ld(&session->in_flight) + done >= ld(&c->max_in_flight) ||
	          ld(&q->held) + done >= c->map->inflight_slots ||
	          ld(&q->held_bytes) > bytes_budget(c->map) / 2;
	queue_unlock(c->map);
	if (done)
		wake_space(c->b, c->map);
	if (done && limited)
		wake_takers(c->b, c->map, done);
	return r;
}

static void requeue_one(shmq_consumer *c, shmq_slot_desc *s, uint32_t slot, int64_t delay)
{
	shmq_map *map = c->map;

	session_settle(c, s);
	if (delay <= 0) {
		slot_back(map, slot, ld(&topic_of(c->b, map)->committed) + 1);
		heap_remove(&map->inflight, slot);
		return;
	}
	s->deadline = later(realtime_ns(), delay);
	SHMQ_KILLPOINT("requeue.due");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_DEFERRED));
	SHMQ_KILLPOINT("requeue.state");
	heap_remove(&map->inflight, slot);
	SHMQ_KILLPOINT("requeue.heap");
	heap_push(&map->deferred, s->deadline, slot);
	due_note(c->b, map->index, s->deadline);
}

int shmq_requeue(shmq_consumer *c, const shmq_message *m, uint32_t n, int64_t delay_ns,
                 uint8_t *ok, int64_t until)
{
	int64_t most = c->b->d->limits.max_req_timeout;
	uint32_t done;
	int r = settle(c, m, n, ok, until, requeue_one,
	               delay_ns < 0 ? 0 : delay_ns > most ? most : delay_ns, &done);

	if (!locked_after(r))
		return not_settled(r);
	c->map->sessions[c->session].requeued += done;
	bump(&c->map->q->requeued, done);
	queue_unlock(c->map);
	spiller_tell(c->b, c->map);
	if (done)
		wake_takers(c->b, c->map, done);
	return r;
}

static void touch_one(shmq_consumer *c, shmq_slot_desc *s, uint32_t slot, int64_t now)
{
	int64_t most = later(s->delivered, c->b->d->limits.max_msg_timeout);
	int64_t deadline = later(now, c->msg_timeout);

	if (c->msg_timeout != INT64_MAX && deadline > most)
		deadline = most;
	s->deadline = deadline;
	SHMQ_KILLPOINT("touch.deadline");
	heap_change(&c->map->inflight, slot, deadline);
}

int shmq_touch(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until)
{
	uint32_t done;
	int r = settle(c, m, n, ok, until, touch_one, now_coarse_ns(), &done);

	if (!locked_after(r))
		return not_settled(r);
	deadline_note(c->b, c->map);
	queue_unlock(c->map);
	return r;
}

/* ---- pins ---- */

int shmq_pin(shmq_consumer *c, const shmq_message *m, int64_t until)
{
	shmq_client_desc *client = &c->b->clients[c->b->client];
	shmq_slot_desc *s;
	uint32_t p;
	int r = consumer_status(c);

	if (!r)
		r = queue_lock(c->b, c->map, until);
	if (r)
		return r == SHMQ_CLOSED ? SHMQ_NOT_IN_FLIGHT : r;
	s = in_flight(c, m);
	if (!s) {
		r = SHMQ_NOT_IN_FLIGHT;
		goto out;
	}
	r = SHMQ_TABLE_FULL;
	for (p = 0; p < SHMQ_PINS; p++) {
		uint64_t unused = 0; /* threads of this client pin on several queues at once */

		if (!ld(&client->pins[p]) &&
		    atomic_compare_exchange_strong(&client->pins[p], &unused,
		                                   c->map->serial << 24 | m->slot)) {
			uint32_t high = ld(&client->pins_high);

			while (high < p + 1 &&
			       !atomic_compare_exchange_weak(&client->pins_high, &high, p + 1))
				;
			SHMQ_KILLPOINT("pin.logged");
			s->pins++;
			r = 0;
			break;
		}
	}
out:
	queue_unlock(c->map);
	return r;
}

int shmq_unpin(shmq_consumer *c, const shmq_message *m, int64_t until)
{
	shmq_map *map = c->map;
	shmq_client_desc *client = &c->b->clients[c->b->client];
	shmq_slot_desc *s = &map->slots[m->slot];
	bool freed = false;
	int r = usable_status(c->b);

	if (!r)
		r = queue_lock(c->b, map, until);
	if (r == SHMQ_FORKED || r == SHMQ_CLOSED)
		return 0; /* the parent's pin; or given back with all else */
	if (r && r != SHMQ_GONE)
		return r;
	for (uint32_t p = 0; p < SHMQ_PINS; p++)
		if (ld(&client->pins[p]) == (map->serial << 24 | m->slot)) {
			bool last = !r && s->pins && !--s->pins;

			st(&client->pins[p], 0);
			SHMQ_KILLPOINT("unpin.logged");
			if (last && SHMQ_STATE_OF(ld(&s->word)) == SHMQ_DONE) {
				held_remove(map, m->slot);
				slot_release(map, m->slot);
				freed = true;
			}
			break;
		}
	if (r) /* the queue is gone, the place in the log is not */
		return 0;
	queue_unlock(map);
	wake_space(c->b, map);
	if (freed)
		wake_takers(c->b, map, 1); /* who waits for what is held to become less */
	return 0;
}

void shmq_consumer_get_info(const shmq_consumer *c, shmq_consumer_info *out)
{
	const shmq_session_desc *s = &c->map->sessions[c->session];

	*out = (shmq_consumer_info){.queue = c->map->index,
	                            .session = c->session,
	                            .in_flight = ld(&s->in_flight),
	                            .max_in_flight = ld(&c->max_in_flight),
	                            .serial = c->map->serial,
	                            .delivered = s->delivered,
	                            .finished = s->finished,
	                            .requeued = s->requeued,
	                            .timed_out = s->timed_out};
}

/* ---- expire ---- */

int shmq_expire(shmq_broker *b, uint32_t queue, int64_t now, int64_t realtime, uint32_t limit,
                int64_t until, uint32_t *expired, uint32_t *due)
{
	shmq_map *map;
	shmq_queue_desc *q;
	uint64_t after;
	uint32_t given_back = 0;
	int r = map_get(b, queue, &map);

	if (r)
		return r;
	touch(b, queue);
	r = queue_lock(b, map, until);
	if (r) {
		map_release(map);
		return r;
	}
	q = map->q;
	*expired = *due = 0;
	defer_drain(b, map);
	after = ld(&topic_of(b, map)->committed) + 1;
	while (*expired + *due < limit && ld(&q->inflight_len) && heap_first(&map->inflight) <= now) {
		uint32_t slot = once(map->inflight.slot[0]);
		shmq_slot_desc *s = &map->slots[slot];
		shmq_session_desc *session;

		if (!slot_is(map, slot, SHMQ_INFLIGHT) || !SANE(s->deadline == map->inflight.when[0])) {
			queue_broken(map);
			break;
		}
		session = session_of(map, s);
		if (session) {
			session_leave(session);
			session->timed_out++;
		}
		slot_back(map, slot, after);
		SHMQ_KILLPOINT("expire.back");
		heap_remove(&map->inflight, slot);
		bump(&q->timed_out, 1);
		++*expired;
	}
	while (*expired + *due < limit && ld(&q->deferred_len) &&
	       heap_first(&map->deferred) <= realtime) {
		uint32_t slot = once(map->deferred.slot[0]);

		if (!slot_is(map, slot, SHMQ_DEFERRED)) {
			queue_broken(map);
			break;
		}
		slot_back(map, slot, after);
		SHMQ_KILLPOINT("expire.due");
		heap_remove(&map->deferred, slot);
		++*due;
	}
	lease_expire(map, now, limit, &given_back);
	st(&b->next_deadline[queue], INT64_MAX);
	deadline_note(b, map);
	st(&b->next_due[queue], heap_first(&map->deferred));
	fence_full();
	defer_drain(b, map); /* a publisher between our drain and our store noted its due too early */
	queue_unlock(map);
	if (*expired + *due + given_back)
		wake_takers(b, map, *expired + *due + given_back);
	wake_space(b, map);
	map_release(map);
	return 0;
}
