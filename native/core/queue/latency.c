/* How long messages take from publish to finish, counted in buckets.
 * death between two counts: one histogram has the sample and another has not. */
#include "queue/latency.h"

#include <string.h>

static uint32_t bucket_of(uint64_t ns)
{
	uint32_t octave, bucket;

	if (ns >> SHMQ_LATENCY_FIRST == 0)
		return 0;
	octave = 63 - (uint32_t)__builtin_clzll(ns);
	bucket = 1 + (octave - SHMQ_LATENCY_FIRST) * 8 + (uint32_t)(ns >> (octave - 3) & 7);
	return bucket < SHMQ_LATENCY_BUCKETS ? bucket : SHMQ_LATENCY_BUCKETS - 1;
}

static void add(shmq_histogram_desc *h, uint32_t bucket, uint64_t ns)
{
	h->count++;
	h->sum += ns;
	h->buckets[bucket]++;
}

void latency_turn(shmq_latency_desc *l, int64_t now)
{
	shmq_histogram_desc *h = &l->window[l->current & 1];

	if (!l->total.since)
		l->total.since = h->since = now;
	if (now - h->since < SHMQ_LATENCY_WINDOW_NS / 2)
		return;
	h = &l->window[~l->current & 1];
	memset(h, 0, sizeof(*h));
	h->since = now;
	l->current = ~l->current & 1;
}

static void add_part(uint32_t *buckets, uint64_t ns)
{
	uint32_t octave, bucket;

	if (ns >> SHMQ_PARTS_FIRST == 0)
		return;
	octave = 63 - (uint32_t)__builtin_clzll(ns);
	bucket = (octave - SHMQ_PARTS_FIRST) * 2 + (uint32_t)(ns >> (octave - 1) & 1);
	buckets[bucket < SHMQ_PARTS_BUCKETS ? bucket : SHMQ_PARTS_BUCKETS - 1]++;
}

void latency_record(shmq_latency_desc *l, uint64_t ns, uint64_t held)
{
	uint32_t bucket = bucket_of(ns);

	add(&l->total, bucket, ns);
	add(&l->window[l->current & 1], bucket, ns);
	if (held > ns)
		held = ns;
	if (held >> SHMQ_PARTS_FIRST == 0)
		return;
	add_part(l->held_total, ns);
	add_part(l->held_wait, ns - held);
	add_part(l->processing, held);
}
