/* The indexed heap against the plainest model: an array of times. */
#include "harness.h"

#define N 400u

static int64_t when[N], model[N];
static uint32_t slot_at[N];
static _Atomic uint32_t length;
static shmq_slot_desc slots[N];
static bool in[N];
static _Atomic uint32_t dirty;
static _Atomic uint32_t most = N;
static const heap h = {when, slot_at, &length, slots, &most, &dirty};
static uint32_t seed = 7;

static uint32_t chance(uint32_t below)
{
	seed = seed * 1664525u + 1013904223u;
	return (uint32_t)((uint64_t)seed * below >> 32);
}

static void check_all(void)
{
	int64_t first = INT64_MAX;
	uint32_t n = 0;

	for (uint32_t i = 0; i < N; i++) {
		if (!in[i]) {
			EQUAL(slots[i].heap, SHMQ_NONE);
			continue;
		}
		n++;
		CHECK(slots[i].heap < ld(&length));
		EQUAL(slot_at[slots[i].heap], i);
		EQUAL(when[slots[i].heap], model[i]);
		if (model[i] < first)
			first = model[i];
	}
	EQUAL(ld(&length), n);
	EQUAL(heap_first(&h), first);
	for (uint32_t i = 1; i < n; i++)
		CHECK(when[(i - 1) / SHMQ_HEAP_WAYS] <= when[i]);
}

static void clear(void)
{
	st(&length, 0);
	for (uint32_t i = 0; i < N; i++) {
		slots[i].heap = SHMQ_NONE;
		in[i] = false;
	}
}

static void any_sequence_of_changes_keeps_order_and_positions(void)
{
	for (int round = 0; round < 20; round++) {
		uint32_t spread = round % 2 ? 10 : 1000000; /* many equal times, or hardly any */

		clear();
		for (int step = 0; step < 2000; step++) {
			uint32_t i = chance(N);

			if (!in[i]) {
				model[i] = chance(spread);
				in[i] = true;
				heap_push(&h, model[i], i);
			} else if (chance(2)) {
				in[i] = false;
				heap_remove(&h, i);
			} else {
				model[i] = chance(spread);
				heap_change(&h, i, model[i]);
			}
			if (step % 50 == 0)
				check_all();
		}
		check_all();
		for (int64_t last = -1; ld(&length);) { /* out in order */
			uint32_t i = slot_at[0];

			CHECK(model[i] >= last);
			last = model[i];
			in[i] = false;
			heap_remove(&h, i);
		}
		check_all();
	}
}

static void made_anew_from_any_order(void)
{
	for (uint32_t n = 0; n < 100; n++) {
		clear();
		for (uint32_t i = 0; i < n; i++) {
			in[i] = true;
			model[i] = when[i] = chance(n % 3 ? 1000 : 3);
			slot_at[i] = i;
		}
		st(&length, n);
		heap_make(&h);
		check_all();
	}
}

/* Positions that a death left behind: nothing is written outside, nothing moves. */
static void a_stale_position_does_no_harm(void)
{
	static const uint32_t stale[] = {SHMQ_NONE, 3, 100, N, UINT32_MAX - 1};

	clear();
	for (uint32_t i = 0; i < 10; i++) {
		in[i] = true;
		heap_push(&h, model[i] = chance(100), i);
	}
	for (size_t i = 0; i < sizeof(stale) / sizeof(stale[0]); i++) {
		slots[50].heap = stale[i];
		heap_remove(&h, 50);
		heap_change(&h, 50, 1);
		slots[50].heap = SHMQ_NONE;
		check_all();
	}
	clear();
	slots[50].heap = 0;
	heap_change(&h, 50, 1);
	EQUAL(ld(&length), 0);
	heap_remove(&h, 50);
	slots[50].heap = SHMQ_NONE;
	check_all();
}

int main(void)
{
	any_sequence_of_changes_keeps_order_and_positions();
	made_anew_from_any_order();
	a_stale_position_does_no_harm();
	return 0;
}
