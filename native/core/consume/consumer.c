/*
 * The consumer's side of one bounded queue: take, finish, requeue, touch, pins, waiting. All of it
 * is under the deliver lock (D). Of the words that belong to the publish lock (P) it reads only the
 * ring tails and `committed`.
 *
 * Order of stores, so that a rebuild from the state words repairs a death:
 *   out of the queue   fields, state word, ring head, heap
 *   finish             state word, heap, ring entry, ring tail
 *   back into it       order counter, fields, state word, heap, ring entry, ring tail
 * After a death with D held the next locker sets `dirty` (locking.c), so any of the stores after
 * the state word may be missing.
 */
#include "consume/consumer.h"

#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/failure.h"
#include "queue/latency.h"
#include "queue/lease.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/session.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "shmq.h"
#include "sync/doorbell.h"

#include <stdlib.h>
#include <string.h>

int shmq_consumer_open(shmq_broker *b, uint32_t queue, uint64_t serial, uint32_t max_in_flight,
                       int64_t msg_timeout_ns, int64_t until, shmq_consumer **out)
{
	shmq_consumer *c = calloc(1, sizeof(*c));
	shmq_map *map;
	int r = c ? queue_enter_serial(b, queue, serial, until, &map) : SHMQ_NO_MEMORY;

	if (r) {
		free(c);
		return r;
	}
	r = session_open(b, map, max_in_flight, &c->session);
	queue_unlock(map);
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

/* Wake waiters after n messages came back or were finished. If there are suspects, not every waiter
 * may take the next message, and this consumer's client may be one that now may: all look. */
static void wake_after(shmq_consumer *c, uint32_t n)
{
	shmq_map *map = c->map;
	bool all = has_policy(map, SHMQ_POLICY_FAILURES) &&
	           (ld(&map->q->suspects) || suspect_is_next(map));

	if (n || all)
		wake_takers(c->b, map, all ? WAKE_ALL : n);
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
	/* Messages remain: wake another waiter so that they are not stranded. */
	if (returned || ring_count(&c->map->q->ready_head, &c->map->q->ready_tail))
		wake_after(c, returned + 1);
	if (c->map->q->flags & SHMQ_FLAG_EPHEMERAL)
		supervisor_ring(c->b, SHMQ_RING_LEFT);
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

/* Returns true if the queue counts failures, so that there may be suspects. */
static bool counts_failures(const shmq_map *map)
{
	return has_policy(map, SHMQ_POLICY_FAILURES);
}

/* Forget stale suspects, and return true if the consumer may take nothing for another's sake. */
static bool barred(shmq_consumer *c)
{
	if (ld(&c->map->q->suspects))
		suspects_forget(c->map);
	return suspect_bars(c->b, c->map, c->session);
}

/* How many expired messages a take drops before it lets others have the lock. */
#define EXPIRED_AT_ONCE 1024u

/* Returns how many of n messages the consumer may take now, whatever waits. */
static uint32_t allowed(shmq_consumer *c, uint32_t n, bool failures)
{
	uint32_t held = ld(&c->map->sessions[c->session].in_flight), most = ld(&c->max_in_flight);
	uint32_t left = held < most ? most - held : 0;

	if (n > left)
		n = left;
	return ld(&c->map->q->paused) || (failures && n && barred(c)) ? 0 : n;
}

/* Take up to n messages. more: how many waiters may take the rest. expired: counts those that were
 * met and dropped. The deliver lock (D) is held. */
static uint32_t take_some(shmq_consumer *c, shmq_message *out, uint32_t n, uint64_t max_bytes,
                          uint32_t *more, uint32_t *expired)
{
	bool failures = counts_failures(c->map);
	shmq_map *map = c->map;
	shmq_queue_desc *q = map->q;
	shmq_session_desc *session = &map->sessions[c->session];
	uint32_t taken = 0, slot;
	_Atomic uint32_t *head;
	int64_t now, deadline, realtime = 0;
	uint64_t order, bytes = 0;
	span at;

	if (ld(&q->defer_head) != ld_acquire(&q->defer_tail)) /* SYNC(defer-tail) */
		defer_drain(c->b, map);
	n = allowed(c, n, failures);
	if (!n)
		return 0;
	now = now_coarse_ns();
	deadline = later(now, c->msg_timeout);
	order = ld(&q->order);
	while (taken < n && bytes < max_bytes && queue_next(map, &slot, &head, &at)) {
		shmq_slot_desc *s = &map->slots[slot];
		uint64_t word;

		if (may_expire(map, s) && expired_away(c->b, map, slot, head, &realtime)) {
			if (++*expired == EXPIRED_AT_ONCE)
				break;
			continue;
		}
		if (failures && s->flags & SHMQ_SLOT_SUSPECT) {
			if (taken)
				break;
			n = 1;
			suspect_note(map, c->session, slot);
		}
		word = SHMQ_WORD(SHMQ_IN_FLIGHT, c->b->client, SHMQ_GENERATION_OF(ld(&s->word)) + 1);
		s->deadline = deadline;
		s->delivered = now;
		s->session = c->session;
		s->move = ++order;
		SHMQ_KILLPOINT("take.fields");
		st_release(&s->word, word); /* SYNC(slot-state) */
		SHMQ_KILLPOINT("take.state");
		st_release(head, ld(head) + 1); /* SYNC(ready-head) SYNC(requeue-head) */
		SHMQ_KILLPOINT("take.head");
		/* A client that dies before this store has handed nothing out: nobody saw the delivery, so
		 * it is not counted. */
		s->attempts++;
		heap_push(&map->in_flight, deadline, slot);
		SHMQ_KILLPOINT("take.heap");
		if (head == &q->ready_head) {
			in_use_add(map, slot);
			ready_bytes_left(map, at.length);
		}
		out[taken++] = (shmq_message){.word = word,
		                              .id = s->id,
		                              .timestamp = s->timestamp,
		                              .body = map->arena + at.body,
		                              .length = at.length,
		                              .slot = slot,
		                              .attempts = s->attempts,
		                              .properties = at.properties,
		                              .sealed = at.sealed};
		bytes += at.length;
	}
	if (!taken)
		return 0;
	*more = queue_next(map, &slot, &head, &at);
	if (failures && suspect_is_next(map))
		*more = WAKE_ALL; /* not every waiter may take it */
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
	uint32_t taken = 0, more = 0, expired;
	int r = consumer_status(c);

	if (r)
		return r;
	for (bool repaired = false;; repaired = true) {
		bool broken;

		r = queue_lock(c->b, map, until);
		if (r)
			return r;
		expired = 0;
		taken = take_some(c, out, n, max_bytes, &more, &expired);
		broken = !taken && ld(&q->dirty);
		queue_unlock(map);
		if (!taken && expired == EXPIRED_AT_ONCE)
			repaired = broken = false;
		else if (!broken)
			break;
		if (repaired)
			return queue_corrupt(map);
	}
	if (!taken) {
		spiller_tell(c->b, map); /* the process that should have noted it may have died before */
		return SHMQ_EMPTY;
	}
	wake_space(c->b, map);
	if (more && ld(&q->takers.summary))
		wake_takers(c->b, map, more);
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
		c->map->sessions[c->session]
				.max_in_flight = max_in_flight; /* for readers without the lock */
}

bool shmq_message_is_ours(shmq_consumer *c, const shmq_message *m)
{
	fence_acquire(); /* SYNC(slot-state) */
	return ld(&c->map->slots[m->slot].word) == m->word;
}

bool may_take(shmq_consumer *c)
{
	shmq_queue_desc *q = c->map->q;

	if (ld(&c->closed) || ld(&q->segment.ready) != SHMQ_READY_STATE || ld(&q->dirty))
		return true;
	if (ld(&q->paused) || ld(&c->map->sessions[c->session].in_flight) >= ld(&c->max_in_flight))
		return false;
	if (counts_failures(c->map) && suspect_bars(c->b, c->map, c->session))
		return false;
	if (ld(&q->requeue_head) != ld(&q->requeue_tail))
		return true;
	/* SYNC(ready-tail) */
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
	if (bell_get(c->b, &bell))
		return bell_none(deadline, 2 * NS_PER_MS);
	(void)consumer_enter(c, bell); /* without an entry it looks again after 1 s */
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
		wake_takers(c->b, c->map, 1); /* hand a ring on that was meant for this thread */
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

/* Values that all messages of a call share: a number, and the CLOCK_MONOTONIC time of a finish. */
typedef struct same {
	int64_t number, monotonic;
} same;

/* Apply `each` to every slot that is in flight to this consumer, under one deliver lock (D). D
 * is held afterwards if this returns 0 or SHMQ_NOT_IN_FLIGHT. */
static int settle(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until,
                  void (*each)(shmq_consumer *, shmq_slot_desc *, uint32_t, same), same its,
                  uint32_t *done)
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
		each(c, s, m[i].slot, its);
	}
	return *done == n ? 0 : SHMQ_NOT_IN_FLIGHT;
}

static bool locked_after(int r)
{
	return r == 0 || r == SHMQ_NOT_IN_FLIGHT;
}

/* The messages of a closed consumer are not in flight to it any more. */
static int not_settled(int r)
{
	return r == SHMQ_CLOSED ? SHMQ_NOT_IN_FLIGHT : r;
}

static void finish_one(shmq_consumer *c, shmq_slot_desc *s, uint32_t slot, same at)
{
	(void)s;
	slot_finish(c->map, slot, at.number, at.monotonic);
}

/* How often a consumer looks how far the two clocks are apart. A step of CLOCK_REALTIME is in the
 * times of so many calls at most. */
#define CLOCKS_EVERY 64u

/* Both clocks for the price of one. */
static same both_clocks(shmq_consumer *c)
{
	int64_t realtime = realtime_ns();
	uint32_t calls = ld(&c->finishes);

	if (calls % CLOCKS_EVERY == 0)
		st(&c->clocks_apart, realtime - now_ns());
	st(&c->finishes, calls + 1);
	return (same){.number = realtime, .monotonic = realtime - ld(&c->clocks_apart)};
}

int shmq_finish(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until)
{
	shmq_session_desc *session = &c->map->sessions[c->session];
	shmq_queue_desc *q = c->map->q;
	same at = both_clocks(c);
	uint32_t done;
	bool limited;
	int r;

	r = settle(c, m, n, ok, until, finish_one, at, &done);
	if (!locked_after(r))
		return not_settled(r);
	latency_turn(c->map->latency, at.number);
	session->finished += done;
	bump(&q->finished, done);
	/* A thread may wait not for messages but for its in-flight limit, or the queue's, to allow
	 * more. */
	limited = ld(&session->in_flight) + done >= ld(&c->max_in_flight) ||
	          ld(&q->in_use) + done >= c->map->in_flight_slots ||
	          ld(&q->in_use_bytes) > bytes_budget(c->map) / 2;
	queue_unlock(c->map);
	if (done)
		wake_space(c->b, c->map);
	if (done)
		wake_after(c, limited ? done : 0);
	return r;
}

static void release_one(shmq_consumer *c, shmq_slot_desc *s, uint32_t slot, same delay)
{
	(void)s;
	slot_give_back(c->b, c->map, slot, delay.number);
}

/* The same as a failure. delay: BY_POLICY, or as the caller wants it. */
static void requeue_one(shmq_consumer *c, shmq_slot_desc *s, uint32_t slot, same delay)
{
	if (!counts_failures(c->map)) {
		release_one(c, s, slot, delay);
		return;
	}
	session_settle(c, s);
	slot_fail(c->b, c->map, slot, ld(&topic_of(c->b, c->map)->committed) + 1, delay.number);
}

static void reject_one(shmq_consumer *c, shmq_slot_desc *s, uint32_t slot, same due)
{
	session_settle(c, s);
	failure_count(s, MOST_FAILURES);
	slot_convict(c->b, c->map, slot, SHMQ_DEAD_REJECTED, due.number);
}

/* Give messages back by `each`, and wake. */
static int give_back(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok,
                     int64_t until, void (*each)(shmq_consumer *, shmq_slot_desc *, uint32_t, same),
                     int64_t argument)
{
	uint32_t done;
	int r = settle(c, m, n, ok, until, each, (same){.number = argument}, &done);

	if (!locked_after(r))
		return not_settled(r);
	c->map->sessions[c->session].requeued += done;
	bump(&c->map->q->requeued, done);
	queue_unlock(c->map);
	spiller_tell(c->b, c->map);
	if (done)
		wake_after(c, done);
	return r;
}

int shmq_requeue(shmq_consumer *c, const shmq_message *m, uint32_t n, int64_t delay_ns, uint8_t *ok,
                 int64_t until)
{
	return give_back(c, m, n, ok, until, requeue_one, delay_within(c->b, delay_ns));
}

int shmq_retry(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until)
{
	return give_back(c, m, n, ok, until, requeue_one, BY_POLICY);
}

int shmq_release(shmq_consumer *c, const shmq_message *m, uint32_t n, int64_t delay_ns, uint8_t *ok,
                 int64_t until)
{
	return give_back(c, m, n, ok, until, release_one, delay_within(c->b, delay_ns));
}

int shmq_reject(shmq_consumer *c, const shmq_message *m, uint32_t n, int64_t hold_ns, uint8_t *ok,
                int64_t until)
{
	char name[SHMQ_NAME];
	int r;

	error_clear();
	if (topic_of(c->b, c->map)->flags & SHMQ_FLAG_DEAD)
		return fail(SHMQ_INVALID,
		            "its topic holds dead letters, so there is none to reject to: finish the "
		            "message, or redrive it");
	r = consumer_status(c);
	if (r)
		return not_settled(r);
	r = shmq_dead_topic(c->b, c->map->index, c->map->serial, until, name);
	if (r == SHMQ_NEED_MAP) /* ours is mapped, so this is another queue that has its number */
		r = SHMQ_GONE;
	return r ? r
	         : give_back(c, m, n, ok, until, reject_one,
	                     hold_ns > 0 ? later(realtime_ns(), hold_ns) : SHMQ_DUE_CONVICTED);
}

static void touch_one(shmq_consumer *c, shmq_slot_desc *s, uint32_t slot, same now)
{
	int64_t most = later(s->delivered, c->b->d->limits.max_msg_timeout);
	int64_t deadline = later(now.number, c->msg_timeout);

	if (c->msg_timeout != INT64_MAX && deadline > most)
		deadline = most;
	s->deadline = deadline;
	SHMQ_KILLPOINT("touch.deadline");
	heap_change(&c->map->in_flight, slot, deadline);
}

int shmq_touch(shmq_consumer *c, const shmq_message *m, uint32_t n, uint8_t *ok, int64_t until)
{
	uint32_t done;
	int r = settle(c, m, n, ok, until, touch_one, (same){.number = now_coarse_ns()}, &done);

	if (!locked_after(r))
		return not_settled(r);
	deadline_note(c->b, c->map);
	queue_unlock(c->map);
	return r;
}

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
		                                   pin_of(c->map->serial, m->slot))) {
			uint32_t high = ld(&client->pins_high);

			while (high < p + 1 && !atomic_compare_exchange_weak(&client->pins_high, &high, p + 1))
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
		return 0; /* it is the parent's pin, or it was given back with all others */
	if (r && r != SHMQ_GONE)
		return r;
	for (uint32_t p = 0; p < SHMQ_PINS; p++)
		if (ld(&client->pins[p]) == pin_of(map->serial, m->slot)) {
			bool last = !r && s->pins && !--s->pins;

			st(&client->pins[p], 0);
			SHMQ_KILLPOINT("unpin.logged");
			if (last && SHMQ_STATE_OF(ld(&s->word)) == SHMQ_PINNED) {
				in_use_remove(map, m->slot);
				slot_release(map, m->slot);
				freed = true;
			}
			break;
		}
	if (r) /* the queue is gone, but its entry in the log is not */
		return 0;
	queue_unlock(map);
	wake_space(c->b, map);
	if (freed)
		wake_takers(c->b, map, 1); /* wake publishers that wait for room */
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
