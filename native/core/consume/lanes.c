/*
 * One consumer of many queues, which are its lanes: a policy says from which of them it takes next.
 *
 * A lane is active if it may have something, else it is quiet: it was empty when it was looked at,
 * after the doorbell had been announced in its queue. The bit stays there, also while the consumer
 * is awake, until somebody wakes it: the waker clears the bit and leaves a hint which queue it was
 * (doorbell.c). So a take looks at active lanes only, a sleep announces nothing, and one message in
 * one of a thousand queues costs one wake-up and a look at two or three lanes.
 *
 *   collect the hints, choose a lane, take                the hint first, then `turn`: one of the
 *   nothing: ASLEEP, fence, hints again, sleep, AWAKE     two sides sees the other
 *
 * A waker that finds the consumer AWAKE does not count on it and wakes another one. A ring that
 * found it ASLEEP counted: if it then takes from another lane, it wakes somebody for those that it
 * was rung for (`owed`). docs/model/many.cpp tries every order of these steps, with deaths.
 * lane.c has the policies.
 *
 * Everything but doorbell, hints and bits is this process's own, under `mutex`, which nobody holds
 * while he waits or takes.
 * death: the reaper clears the bits and the doorbell, and gives the messages back.
 */
#include "consume/lane.h"

#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/libc.h"
#include "consume/consumer.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "queue/slots.h"
#include "shmq.h"
#include "sync/doorbell.h"

#include <stdlib.h>
#include <string.h>

/* ---- the doorbell --------------------------------------------------------------------------- */

static bool bell_open(shmq_lanes *l)
{
	uint32_t bell;
	shmq_waiter_desc *waiter;

	if (bell_get(l->b, &bell))
		return false;
	waiter = &l->b->waiters[bell];
	bell_plain(waiter);
	st(&waiter->names, l->follows);
	atomic_store(&waiter->turn, SHMQ_TURN_AWAKE);
	SHMQ_KILLPOINT("lanes.bell");
	st(&l->bell, bell);
	return true;
}

/* ---- take ----------------------------------------------------------------------------------- */

/* Rings that counted on this consumer may have been for other lanes than the one it took from. */
static void pass_on(shmq_lanes *l, const lane *but)
{
	l->owed = false;
	for (uint32_t i = 0; i < l->levels_count; i++) {
		level *v = &l->levels[i];

		for (uint32_t at = active_from(v, 0); at < v->count; at = active_from(v, at + 1)) {
			lane *x = v->lanes[at];

			if (x != but && ld(&takers_of(x)->summary) && may_take(x->c))
				wake_takers(l->b, x->c->map, 1);
		}
	}
}

/* Every bit was withdrawn before, so a waker that comes now cannot mean the next user of the bell.
 * One that had cleared a bit may ring it in vain: whoever else waits is woken for what is there. */
static void bell_end(shmq_lanes *l)
{
	uint32_t bell = ld(&l->bell);

	if (bell == SHMQ_NONE)
		return;
	lanes_activate_all(l);
	pass_on(l, NULL);
	bell_plain(&l->b->waiters[bell]);
	st(&l->bell, SHMQ_NONE);
	bell_put(l->b, bell);
}

/* Nobody takes from a lane that was removed, and nobody else knows it any more. */
static void lane_free(lane *x)
{
	if (x->removed && !x->users)
		free(x);
}

/* `mutex` is held, but not while messages are taken. */
static int take_from(shmq_lanes *l, lane *x, shmq_message *out, uint32_t n, int64_t until,
                     uint32_t *got)
{
	uint32_t taken = 0;
	int r;

	if (!lane_hold(l, x))
		return SHMQ_NO_MEMORY;
	x->users++;
	l->held += n;
	l->reserved += n;
	pthread_mutex_unlock(&l->mutex);
	r = shmq_take(x->c, out, n, until, &taken);
	pthread_mutex_lock(&l->mutex);
	l->reserved -= n;
	l->held -= n - taken < l->held ? n - taken : l->held;
	if (taken < n && ld(&l->limited)) /* the limit that another thread met was this call's */
		shmq_lanes_wake(l);
	x->users--;
	if (r == SHMQ_AGAIN)
		x->refused = l->round;
	if (!r) {
		*got = taken;
		if (!x->removed)
			lanes_served(l, x, taken);
		if (l->owed)
			pass_on(l, x);
	}
	lane_free(x);
	return r;
}

#define TRIES 64

/* Take from the lane that is next. A lane whose lock is held elsewhere is passed over, so that a
 * process that stopped with it does not stop the other lanes; `until` is for a second round, in
 * which there is no other. */
static int take_next(shmq_lanes *l, shmq_message *out, uint32_t n, int64_t until, uint32_t *got,
                     void **tag)
{
	bool refused = false;

	l->round++;
	for (uint32_t tries = 0; tries < TRIES; tries++) {
		uint32_t most;
		lane *x;
		int r;

		if (ld(&l->closed))
			return SHMQ_CLOSED;
		lanes_collect(l);
		most = lanes_room(l, n);
		x = most ? lanes_choose(l) : NULL;
		if (!x) {
			if (l->owed && !most)
				pass_on(l, NULL);
			l->owed = false;
			break;
		}
		*tag = x->tag;
		r = take_from(l, x, out, most, until, got);
		if (r != SHMQ_EMPTY && (r != SHMQ_AGAIN || until))
			return r;
		refused |= r == SHMQ_AGAIN;
	}
	return refused ? SHMQ_AGAIN : SHMQ_EMPTY;
}

int shmq_lanes_take(shmq_lanes *l, shmq_message *out, uint32_t n, int64_t until, uint32_t *got,
                    void **tag)
{
	int r = usable_status(l->b);
	int64_t now;

	if (r)
		return r;
	pthread_mutex_lock(&l->mutex);
	now = now_coarse_ns();
	if (now - l->looked >= NS_PER_S) {
		l->looked = now;
		lanes_activate_all(l);
	}
	r = take_next(l, out, n, 0, got, tag);
	if (r == SHMQ_AGAIN && until)
		r = take_next(l, out, n, until, got, tag);
	pthread_mutex_unlock(&l->mutex);
	return r;
}

bool shmq_lanes_look(shmq_lanes *l)
{
	bool found;

	if (usable_status(l->b))
		return true;
	pthread_mutex_lock(&l->mutex);
	l->round++;
	lanes_collect(l);
	found = ld(&l->closed) || (lanes_room(l, 1) && lanes_choose(l));
	pthread_mutex_unlock(&l->mutex);
	return found;
}

/* ---- wait ----------------------------------------------------------------------------------- */

static bool has_hints(const shmq_lanes *l)
{
	const shmq_waiter_desc *waiter = &l->b->waiters[ld(&l->bell)];
	uint64_t bits = 0;

	for (uint32_t i = 0; i < SHMQ_HINTS / 64; i++)
		bits |= ld(&waiter->hints[i]);
	return bits != 0;
}

/* Another thread sleeps on the doorbell: wait until it has woken. */
static int wait_behind(shmq_lanes *l, int64_t deadline)
{
	int64_t now = now_ns(), until = later(now, NS_PER_S);
	struct timespec t = timespec_of(deadline < until ? deadline : until);

	if (deadline <= now)
		return SHMQ_TIMEOUT;
	pthread_cond_timedwait(&l->awake, &l->mutex, &t);
	return now_ns() < deadline ? 0 : SHMQ_TIMEOUT;
}

/* How many messages wait where there are any, after a sleep. */
static uint32_t gathered(const shmq_lanes *l)
{
	for (uint32_t i = 0; i < l->levels_count; i++) {
		const level *v = &l->levels[i];
		uint32_t at = active_from(v, 0);

		if (at < v->count) {
			shmq_queue_desc *q = v->lanes[at]->c->map->q;

			return ring_count(&q->ready_head, &q->ready_tail);
		}
	}
	return 0;
}

static int sleep_on_bell(shmq_lanes *l, int64_t deadline, bool limited)
{
	uint32_t bell = ld(&l->bell);
	shmq_waiter_desc *waiter = &l->b->waiters[bell];
	bool slept = false;
	int r = 0;

	bell_drain(l->b, bell);
	st(&l->limited, limited);
	/* From here on wakers ring, and threads that settle messages. */
	atomic_store(&waiter->turn, limited ? SHMQ_TURN_LIMITED : SHMQ_TURN_ASLEEP);
	fence_full(); /* SYNC(hint) */
	SHMQ_KILLPOINT("lanes.asleep");
	if (!ld(&l->woken) && (limited ? !lanes_room(l, 1) : !has_hints(l))) {
		l->sleeping = true;
		pthread_mutex_unlock(&l->mutex);
		r = bell_wait(l->b, bell, deadline, NS_PER_S, &slept);
		pthread_mutex_lock(&l->mutex);
		l->sleeping = false;
	}
	/* A waker that counted on this thread has made it AWAKE. */
	if (atomic_exchange(&waiter->turn, SHMQ_TURN_AWAKE) == SHMQ_TURN_AWAKE && !limited)
		l->owed = true;
	st(&l->limited, false);
	atomic_store(&l->woken, false);
	if (slept && !r) {
		lanes_collect(l);
		bell_gathered(gathered(l));
	}
	pthread_cond_broadcast(&l->awake);
	return r;
}

int shmq_lanes_wait(shmq_lanes *l, int64_t deadline)
{
	int r = usable_status(l->b);
	bool limited;

	if (r)
		return r;
	pthread_mutex_lock(&l->mutex);
	l->round++;
	lanes_collect(l);
	limited = !lanes_room(l, 1);
	if (ld(&l->closed))
		r = SHMQ_CLOSED;
	else if (l->sleeping)
		r = wait_behind(l, deadline);
	else if (ld(&l->bell) == SHMQ_NONE && !bell_open(l)) {
		pthread_mutex_unlock(&l->mutex);
		return bell_none(deadline, 2 * NS_PER_MS);
	} else if (limited || !lanes_choose(l))
		r = sleep_on_bell(l, deadline, limited);
	if (ld(&l->closed) && !l->sleeping && !usable_status(l->b))
		bell_end(l);
	pthread_mutex_unlock(&l->mutex);
	return r;
}

void shmq_lanes_wake(shmq_lanes *l)
{
	uint32_t bell = ld(&l->bell);

	if (usable_status(l->b))
		return;
	if (!atomic_exchange(&l->woken, true) && bell != SHMQ_NONE)
		bell_ring(l->b, bell);
}

void shmq_lanes_settled(shmq_lanes *l)
{
	fence_full(); /* SYNC(hint) */
	if (ld(&l->limited))
		shmq_lanes_wake(l);
}

void shmq_lanes_pass(shmq_lanes *l)
{
	if (usable_status(l->b))
		return;
	pthread_mutex_lock(&l->mutex);
	lanes_collect(l);
	if (!ld(&l->closed))
		pass_on(l, NULL);
	pthread_mutex_unlock(&l->mutex);
}

/* ---- life ----------------------------------------------------------------------------------- */

int shmq_lanes_open(shmq_broker *b, bool strict, bool follows, const uint32_t *weights,
                    uint32_t levels, uint32_t max_in_flight, shmq_lanes **out)
{
	int r = usable_status(b);
	shmq_lanes *l;

	if (r)
		return r;
	for (uint32_t i = 0; i < levels; i++)
		if (!weights[i] || weights[i] > SHMQ_WEIGHT_MOST)
			return SHMQ_INVALID;
	l = levels ? calloc(1, sizeof(*l)) : NULL;
	if (!l)
		return levels ? SHMQ_NO_MEMORY : SHMQ_INVALID;
	l->levels = calloc(levels, sizeof(*l->levels));
	if (!l->levels) {
		free(l);
		return SHMQ_NO_MEMORY;
	}
	pthread_mutex_init(&l->mutex, NULL);
	cond_init(&l->awake);
	l->levels_count = levels;
	for (uint32_t i = 0; i < levels; i++)
		l->levels[i].stride = SHARES / weights[i];
	l->strict = strict;
	l->follows = follows;
	l->max_in_flight = max_in_flight;
	l->b = b;
	st(&l->bell, SHMQ_NONE);
	broker_hold(b);
	(void)bell_open(l);
	*out = l;
	return 0;
}

void shmq_lanes_limit(shmq_lanes *l, uint32_t max_in_flight)
{
	pthread_mutex_lock(&l->mutex);
	l->max_in_flight = max_in_flight;
	if (l->sleeping)
		shmq_lanes_wake(l);
	pthread_mutex_unlock(&l->mutex);
}

int shmq_lanes_add(shmq_lanes *l, shmq_consumer *c, uint32_t number, void *tag)
{
	lane **hint = &l->by_hint[c->map->index % SHMQ_HINTS];
	int r = usable_status(l->b);
	lane *x;

	if (r)
		return r;
	if (number >= l->levels_count || c->b != l->b)
		return SHMQ_INVALID;
	x = calloc(1, sizeof(*x));
	if (!x)
		return SHMQ_NO_MEMORY;
	pthread_mutex_lock(&l->mutex);
	if (!level_grow(&l->levels[number])) {
		pthread_mutex_unlock(&l->mutex);
		free(x);
		return SHMQ_NO_MEMORY;
	}
	x->c = c;
	x->tag = tag;
	x->level = &l->levels[number];
	x->place = x->level->count++;
	x->level->lanes[x->place] = x;
	x->next = *hint;
	*hint = x;
	lane_activate(x);
	if (l->sleeping) /* any other thread finds the lane by itself */
		shmq_lanes_wake(l);
	pthread_mutex_unlock(&l->mutex);
	return 0;
}

void shmq_lanes_remove(shmq_lanes *l, shmq_consumer *c)
{
	uint32_t bell = ld(&l->bell), kept = 0;
	lane **link, *x;

	pthread_mutex_lock(&l->mutex);
	for (link = &l->by_hint[c->map->index % SHMQ_HINTS]; (x = *link) && x->c != c; link = &x->next)
		;
	if (x) {
		*link = x->next;
		level_leave(x);
		for (uint32_t i = 0; i < l->holders_count; i++)
			if (l->holders[i] != x)
				l->holders[kept++] = l->holders[i];
		l->holders_count = kept;
		l->held = UINT32_MAX; /* count anew */
		if (bell != SHMQ_NONE && !usable_status(l->b)) {
			wait_withdraw(takers_of(x), bell);
			if (may_take(c)) /* a waker may have cleared the bit before */
				wake_takers(l->b, c->map, 1);
		}
		x->removed = true;
		lane_free(x);
	}
	pthread_mutex_unlock(&l->mutex);
}

void shmq_lanes_close(shmq_lanes *l)
{
	uint32_t bell = ld(&l->bell);

	if (usable_status(l->b)) {
		st(&l->closed, true);
		return;
	}
	pthread_mutex_lock(&l->mutex);
	if (!ld(&l->closed) && bell != SHMQ_NONE) {
		for (uint32_t i = 0; i < l->levels_count; i++)
			for (uint32_t k = 0; k < l->levels[i].count; k++)
				wait_withdraw(takers_of(l->levels[i].lanes[k]), bell);
		if (!l->sleeping)
			bell_end(l); /* else the thread that sleeps does that */
	}
	st(&l->closed, true);
	shmq_lanes_wake(l);
	pthread_cond_broadcast(&l->awake);
	pthread_mutex_unlock(&l->mutex);
}

void shmq_lanes_free(shmq_lanes *l)
{
	shmq_broker *b = l->b;

	for (uint32_t i = 0; i < l->levels_count; i++) {
		for (uint32_t k = 0; k < l->levels[i].count; k++)
			free(l->levels[i].lanes[k]);
		free(l->levels[i].lanes);
		free(l->levels[i].active);
	}
	free(l->levels);
	free(l->holders);
	free(l);
	broker_release(b);
}
