/*
 * Requests to the supervisor, which alone creates and removes segments. A client fills an entry,
 * stores POSTED last, rings, and waits.
 * death of the client: the supervisor answers into an entry that the reaper frees.
 */
#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/names.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "queue/locking.h"
#include "shmq.h"
#include "shmq_store.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"

#include <string.h>

static int post(shmq_broker *b, enum shmq_request_kind kind, const char *topic, const char *channel,
                const uint64_t numbers[2], int64_t until, uint32_t *ticket)
{
	shmq_request_desc *q = NULL;
	uint32_t bell = SHMQ_NONE;
	int r = usable_status(b);

	if (r)
		return r;
	if (!name_ok(topic) || (channel && *channel && !name_ok(channel)))
		return SHMQ_BAD_NAME;
	if (ld(&b->d->segment.ready) != SHMQ_READY_STATE)
		return SHMQ_GONE;
	if (ld(&b->d->stopping))
		return fail(SHMQ_NOT_RUNNING, "the broker is stopping");
	(void)bell_get(b, &bell); /* without a doorbell the client polls */
	r = registry_lock(b, until);
	if (r)
		goto fail;
	for (uint32_t i = 0; i < SHMQ_REQUESTS && !q; i++)
		if (ld(&b->requests[i].state) == SHMQ_REQUEST_FREE)
			q = &b->requests[i];
	if (!q) {
		registry_unlock(b);
		r = SHMQ_AGAIN;
		goto fail;
	}
	q->op = (uint32_t)kind;
	q->client = b->client;
	q->waiter = bell;
	q->status = 0;
	memset(q->topic, 0, sizeof(q->topic));
	memset(q->channel, 0, sizeof(q->channel));
	strcpy(q->topic, topic);
	if (channel)
		strcpy(q->channel, channel);
	q->numbers[0] = numbers[0];
	q->numbers[1] = numbers[1];
	SHMQ_KILLPOINT("request.filled");
	st_release(&q->state, SHMQ_REQUEST_POSTED); /* SYNC(request-state) */
	registry_unlock(b);
	*ticket = (uint32_t)(q - b->requests);
	supervisor_ring(b, SHMQ_RING_REQUEST);
	return 0;
fail:
	if (bell != SHMQ_NONE)
		bell_put(b, bell);
	return r;
}

int shmq_request_post(shmq_broker *b, enum shmq_request_kind kind, const char *topic,
                      const char *channel, int64_t until, uint32_t *ticket)
{
	return post(b, kind, topic, channel, (const uint64_t[2]){0, 0}, until, ticket);
}

int shmq_store_request(shmq_broker *b, const char *name, uint32_t max_keys, uint64_t max_bytes,
                       int64_t until, uint32_t *ticket)
{
	int r = shmq_store_limits_check(max_keys, max_bytes);

	return r ? r
	         : post(b, SHMQ_CREATE_STORE, name, NULL, (const uint64_t[2]){max_keys, max_bytes},
	                until, ticket);
}

/* The reason that the supervisor gave becomes the details of the error. */
static int refused(const shmq_request_desc *q)
{
	return fail(SHMQ_REFUSED, "%.*s%.*s", SHMQ_NAME - 1, q->topic, SHMQ_NAME - 1, q->channel);
}

int shmq_request_wait(shmq_broker *b, uint32_t ticket, int64_t deadline)
{
	shmq_request_desc *q = &b->requests[ticket];
	uint32_t bell = q->waiter;
	bool slept;
	int r = 0;

	for (;;) {
		if (shmq_broker_forked(b))
			return SHMQ_FORKED;
		if (ld_acquire(&q->state) == SHMQ_REQUEST_DONE) /* SYNC(request-state) */
			return q->status == SHMQ_REFUSED ? refused(q) : q->status;
		if (ld(&b->d->segment.ready) != SHMQ_READY_STATE)
			return SHMQ_GONE;
		if (!shmq_supervisor_alive(b))
			return SHMQ_NOT_RUNNING;
		if (r == SHMQ_TIMEOUT || r == SHMQ_INTERRUPTED)
			return r;
		r = bell < SHMQ_WAITERS ? bell_wait(b, bell, deadline, NS_PER_S / 4, &slept)
		                        : bell_none(deadline, 5 * NS_PER_MS);
	}
}

void shmq_request_end(shmq_broker *b, uint32_t ticket)
{
	shmq_request_desc *q = &b->requests[ticket];
	uint32_t bell = q->waiter, state = ld(&q->state);

	if (shmq_broker_forked(b))
		return;
	/* POSTED -> ABANDONED unless the supervisor answers just now. */
	if (state == SHMQ_REQUEST_POSTED &&
	    atomic_compare_exchange_strong(&q->state, &state, SHMQ_REQUEST_ABANDONED)) {
		if (bell != SHMQ_NONE)
			bell_put(b, bell); /* a late ring only causes its next user one more look */
		return;
	}
	if (bell != SHMQ_NONE)
		bell_put(b, bell);
	st_release(&q->state, SHMQ_REQUEST_FREE); /* SYNC(request-state) */
}

int shmq_request_next(shmq_broker *b, int64_t until, shmq_request *out)
{
	(void)until;
	for (uint32_t i = 0; i < SHMQ_REQUESTS; i++) {
		shmq_request_desc *q = &b->requests[i];
		uint32_t state = ld_acquire(&q->state); /* SYNC(request-state) */

		if (state == SHMQ_REQUEST_ABANDONED) {
			st_release(&q->state, SHMQ_REQUEST_FREE); /* SYNC(request-state) */
		} else if (state == SHMQ_REQUEST_POSTED) {
			out->ticket = i;
			out->kind = q->op;
			out->client = q->client;
			memcpy(out->topic, q->topic, SHMQ_NAME);
			memcpy(out->channel, q->channel, SHMQ_NAME);
			out->numbers[0] = q->numbers[0];
			out->numbers[1] = q->numbers[1];
			out->topic[SHMQ_NAME - 1] = out->channel[SHMQ_NAME - 1] = 0;
			return 0;
		}
	}
	return SHMQ_EMPTY;
}

void shmq_request_answer(shmq_broker *b, uint32_t ticket, int status, const char *why)
{
	shmq_request_desc *q = &b->requests[ticket];
	uint32_t posted = SHMQ_REQUEST_POSTED, bell = q->waiter;

	if (status == SHMQ_REFUSED) {
		size_t first = why ? strnlen(why, SHMQ_NAME - 1) : 0;
		size_t rest = why ? strnlen(why + first, SHMQ_NAME - 1) : 0;

		memset(q->topic, 0, sizeof(q->topic));
		memset(q->channel, 0, sizeof(q->channel));
		memcpy(q->topic, why ? why : "", first);
		memcpy(q->channel, why ? why + first : "", rest);
	}
	q->status = status;
	if (!atomic_compare_exchange_strong(&q->state, &posted, SHMQ_REQUEST_DONE))
		/* SYNC(request-state) */
		st_release(&q->state, SHMQ_REQUEST_FREE); /* abandoned meanwhile */
	else if (bell != SHMQ_NONE)
		bell_ring(b, bell);
}
