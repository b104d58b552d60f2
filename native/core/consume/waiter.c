/*
 * One thread that waits for many consumers: its bell is announced in all their queues at once. As
 * in doorbell.c, a ring only means "look again", and does not say for which queue.
 *
 *   announce, forget old rings, look, sleep, withdraw, look
 *
 * The last look finds the messages that belong to a ring before the withdrawal, for whichever
 * consumer it was; so no ring is lost here.
 *
 * Another thread of the process, which publishes, may catch the rings that it would give. It takes
 * the messages at once, and the sleeping thread is not woken for them. It announces the bell again
 * as the sleeper would: announce, look.
 */
#include "consume/waiter.h"

#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "consume/consumer.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "shmq.h"
#include "sync/doorbell.h"

#include <stdlib.h>

int shmq_waiter_open(shmq_broker *b, shmq_waiter **out)
{
	uint32_t bell = SHMQ_NONE;
	int r = usable_status(b);
	shmq_waiter *w;

	if (r)
		return r;
	w = calloc(1, sizeof(*w));
	if (!w)
		return SHMQ_NO_MEMORY;
	(void)bell_get(b, &bell);
	broker_hold(b);
	w->b = b;
	st(&w->bell, bell);
	*out = w;
	return 0;
}

uint32_t waiter_bell(shmq_waiter *w)
{
	uint32_t bell = ld(&w->bell);

	if (bell == SHMQ_NONE && !bell_get(w->b, &bell))
		st(&w->bell, bell);
	return bell;
}

static uint32_t look(const shmq_waiter *w, shmq_consumer *const *consumers, uint32_t n,
                     uint32_t *ready)
{
	uint32_t count = 0;

	for (uint32_t i = 0; i < n; i++)
		if (consumers[i]->b != w->b || may_take(consumers[i]))
			ready[count++] = i;
	return count;
}

static int announce_and_sleep(shmq_waiter *w, uint32_t bell, shmq_consumer *const *consumers,
                              uint32_t n, int64_t deadline, uint32_t *ready)
{
	int r = 0;

	for (uint32_t i = 0; i < n; i++) {
		(void)consumer_enter(consumers[i], bell); /* without an entry it looks again after 1 s */
		wait_announce(&consumers[i]->map->q->takers, bell);
		SHMQ_KILLPOINT("waiter.announced");
	}
	bell_drain(w->b, bell);
	if (!look(w, consumers, n, ready) && !ld(&w->woken))
		r = bell_sleep(w->b, bell, deadline, NS_PER_S);
	for (uint32_t i = 0; i < n; i++) {
		wait_withdraw(&consumers[i]->map->q->takers, bell);
		consumer_leave(consumers[i], bell);
	}
	return r;
}

int shmq_waiter_wait(shmq_waiter *w, shmq_consumer *const *consumers, uint32_t n, int64_t deadline,
                     uint32_t *ready, uint32_t *count)
{
	uint32_t bell;
	int r = usable_status(w->b);

	*count = 0;
	if (!r && ld(&w->closed))
		r = SHMQ_CLOSED;
	if (r)
		return r;
	*count = look(w, consumers, n, ready);
	if (deadline <= now_ns())
		return *count ? 0 : SHMQ_TIMEOUT;
	if (!*count) {
		bell = waiter_bell(w);
		r = bell == SHMQ_NONE ? bell_none(deadline, 2 * NS_PER_MS)
		                      : announce_and_sleep(w, bell, consumers, n, deadline, ready);
		*count = look(w, consumers, n, ready);
	}
	/* A waker makes its change before it sets `woken`, and the caller looks at the change next. */
	atomic_store(&w->woken, false);
	return *count ? 0 : r;
}

void shmq_waiter_wake(shmq_waiter *w)
{
	uint32_t bell = ld(&w->bell);

	if (usable_status(w->b) || ld(&w->closed))
		return;
	if (!atomic_exchange(&w->woken, true) && bell != SHMQ_NONE)
		bell_ring(w->b, bell);
}

void shmq_waiter_catch(shmq_waiter *w)
{
	uint32_t bell = ld(&w->bell);

	if (bell != SHMQ_NONE && !ld(&w->closed))
		bell_catch(w->b, bell);
}

uint32_t shmq_waiter_caught(uint32_t *queues)
{
	return bell_caught(queues);
}

bool shmq_waiter_announce(shmq_waiter *w, shmq_consumer *c)
{
	uint32_t bell = ld(&w->bell);

	if (usable_status(w->b) || ld(&w->closed) || c->b != w->b)
		return false;
	if (bell != SHMQ_NONE)
		wait_announce(&c->map->q->takers, bell);
	return may_take(c);
}

bool shmq_waiter_withdraw(shmq_waiter *w, shmq_consumer *c)
{
	uint32_t bell = ld(&w->bell);

	if (usable_status(w->b) || ld(&w->closed) || c->b != w->b)
		return false;
	if (bell != SHMQ_NONE)
		wait_withdraw(&c->map->q->takers, bell);
	return may_take(c);
}

void shmq_waiter_close(shmq_waiter *w)
{
	uint32_t bell = ld(&w->bell);

	if (atomic_exchange(&w->closed, true) || usable_status(w->b) || bell == SHMQ_NONE)
		return;
	bell_put(w->b, bell);
}

void shmq_waiter_free(shmq_waiter *w)
{
	shmq_broker *b = w->b;

	free(w);
	broker_release(b);
}
