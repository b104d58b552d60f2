/*
 * Indexed min-heap of (time, slot) in two arrays that numpy can see; each slot knows its position.
 * A node has eight children, whose times lie in one or two cache lines: in a heap of a million each
 * level costs a cache miss or two. It belongs to the deliver lock (D) and is derived: heap_make
 * rebuilds it. Garbage in it makes the queue dirty.
 */
#ifndef SHMQ_HEAP_H
#define SHMQ_HEAP_H

#include "memory/layout.h"

typedef struct heap {
	int64_t *when;
	uint32_t *slot;
	_Atomic uint32_t *length;
	shmq_slot_desc *slots;
	_Atomic uint32_t *most;  /* capacity in entries; also the number of slots */
	_Atomic uint32_t *dirty; /* set if an entry cannot be right */
} heap;

void heap_push(const heap *h, int64_t when, uint32_t slot);
/* The slot must be in this heap. */
void heap_remove(const heap *h, uint32_t slot);
void heap_change(const heap *h, uint32_t slot, int64_t when);
/* Order the first *length entries as a heap. */
void heap_make(const heap *h);
static inline int64_t heap_first(const heap *h);

#include "base/atomics.h"
static inline int64_t heap_first(const heap *h)
{
	return ld(h->length) ? h->when[0] : INT64_MAX; /* SYNC(heap-length) */
}

#endif
