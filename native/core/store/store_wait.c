/*
 * Waiting for keys of a results store. Each stripe of the hashes has a bitmap of waiters, and a count
 * of the sets in it.
 *
 *   waiter: read the counts, look for the keys; set its bit in their stripes, fence, compare the
 *           counts, sleep
 *   set:    store, raise the stripe's count, unlock, fence, clear the bits, post
 *
 * A key of the same stripe wakes a waiter in vain: it looks once too often.
 */
#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "consume/waiter.h"
#include "memory/mapping.h"
#include "store/store_table.h"
#include "sync/doorbell.h"

_Static_assert(SHMQ_STRIPES == SHMQ_STORE_STRIPES, "stripes");

uint32_t shmq_store_stripe(const shmq_store *s, const shmq_body *key)
{
	return stripe_of(store_hash(s->seed, key->data, key->length));
}

void shmq_store_seen(const shmq_store *s, uint32_t seen[SHMQ_STRIPES])
{
	for (uint32_t i = 0; i < SHMQ_STRIPES; i++)
		seen[i] = ld_acquire(&s->d->stripes[i].stored); /* SYNC(store-stripe) */
}

static bool has_news(const shmq_store *s, uint64_t stripes, const uint32_t seen[SHMQ_STRIPES])
{
	for (; stripes; stripes &= stripes - 1) {
		int i = __builtin_ctzll(stripes);

		if (ld(&s->d->stripes[i].stored) != seen[i])
			return true;
	}
	return false;
}

int shmq_store_wait(shmq_store *s, shmq_waiter *w, uint64_t stripes,
                    const uint32_t seen[SHMQ_STRIPES], int64_t deadline)
{
	uint32_t bell = SHMQ_NONE;
	bool slept = false;
	int r = usable_status(s->b);

	if (!r && (ld(&s->d->segment.ready) != SHMQ_READY_STATE || (w && ld(&w->closed))))
		r = w && ld(&w->closed) ? SHMQ_CLOSED : SHMQ_GONE;
	if (r)
		return r;
	if (w)
		bell = waiter_bell(w);
	else
		(void)bell_get(s->b, &bell);
	if (bell == SHMQ_NONE)
		return bell_none(deadline, 2 * NS_PER_MS);
	for (uint64_t left = stripes; left; left &= left - 1) {
		wait_announce(&s->d->stripes[__builtin_ctzll(left)].waiters, bell);
		SHMQ_KILLPOINT("store_wait.announced");
	}
	if (w)
		bell_drain(s->b, bell); /* rings of its last wait */
	if (!has_news(s, stripes, seen) && !(w && ld(&w->woken)))
		r = w ? bell_sleep(s->b, bell, deadline, NS_PER_S)
		      : bell_wait(s->b, bell, deadline, NS_PER_S, &slept);
	for (uint64_t left = stripes; left; left &= left - 1)
		wait_withdraw(&s->d->stripes[__builtin_ctzll(left)].waiters, bell);
	if (slept)
		bell_gathered(1); /* a result is an answer, and no stream */
	if (w)
		atomic_store(&w->woken, false);
	else
		bell_put(s->b, bell);
	return has_news(s, stripes, seen) ? 0 : r;
}
