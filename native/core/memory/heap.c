#include "memory/heap.h"

#include "base/atomics.h"
#include "base/bounds.h"

static void broken(const heap *h)
{
	st(h->dirty, 1);
}

static void place(const heap *h, uint32_t at, int64_t when, uint32_t slot)
{
	if (!TRUST_CHECK(slot < ld(h->most))) {
		broken(h);
		return;
	}
	h->when[at] = when;
	h->slot[at] = slot;
	h->slots[slot].heap = at;
}

static uint32_t up(const heap *h, uint32_t at, int64_t when)
{
	while (at) {
		uint32_t parent = (at - 1) / SHMQ_HEAP_WAYS;

		if (h->when[parent] <= when)
			break;
		place(h, at, h->when[parent], once(h->slot[parent]));
		at = parent;
	}
	return at;
}

static uint32_t down(const heap *h, uint32_t at, uint32_t n, int64_t when)
{
	for (;;) {
		uint32_t first = SHMQ_HEAP_WAYS * at + 1, end = first + SHMQ_HEAP_WAYS, child = first;

		if (first >= n)
			break;
		for (uint32_t i = first + 1; i < n && i < end; i++)
			if (h->when[i] < h->when[child])
				child = i;
		if (h->when[child] >= when)
			break;
		place(h, at, h->when[child], h->slot[child]);
		at = child;
	}
	return at;
}

void heap_push(const heap *h, int64_t when, uint32_t slot)
{
	uint32_t n = ld(h->length);

	if (!TRUST_CHECK(n < ld(h->most))) {
		broken(h);
		return;
	}
	place(h, up(h, n, when), when, slot);
	st_release(h->length, n + 1); /* SYNC(heap-length) */
}

void heap_remove(const heap *h, uint32_t slot)
{
	uint32_t at = h->slots[slot].heap, n = ld(h->length), last;
	int64_t when;

	if (!TRUST_CHECK(n <= ld(h->most) && at < n && h->slot[at] == slot)) {
		broken(h);
		return;
	}
	n--;
	last = h->slot[n];
	when = h->when[n];
	st_release(h->length, n); /* SYNC(heap-length) */
	h->slots[slot].heap = SHMQ_NONE;
	if (at == n)
		return;
	if (at && when < h->when[(at - 1) / SHMQ_HEAP_WAYS])
		place(h, up(h, at, when), when, last);
	else
		place(h, down(h, at, n, when), when, last);
}

void heap_change(const heap *h, uint32_t slot, int64_t when)
{
	uint32_t at = h->slots[slot].heap, n = ld(h->length);

	if (!TRUST_CHECK(n <= ld(h->most) && at < n && h->slot[at] == slot)) {
		broken(h);
		return;
	}
	if (when < h->when[at])
		place(h, up(h, at, when), when, slot);
	else
		place(h, down(h, at, n, when), when, slot);
}

void heap_make(const heap *h)
{
	uint32_t n = ld(h->length);

	for (uint32_t at = n / SHMQ_HEAP_WAYS + (n > 1); at--;) {
		int64_t when = h->when[at];
		uint32_t slot = h->slot[at];

		place(h, down(h, at, n, when), when, slot);
	}
	for (uint32_t at = 0; at < n; at++) {
		uint32_t slot = once(h->slot[at]);

		if (TRUST_CHECK(slot < ld(h->most)))
			h->slots[slot].heap = at;
	}
}
