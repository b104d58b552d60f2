/*
 * Sorting ring entries by a number of their slots, the key.
 *
 * A queue may have many millions of slots, and it is sorted while its locks are held. So the keys are
 * read once, in the order of the entries, into scratch space, and a radix sort moves keys and entries
 * from end to end: no comparison waits for a slot. Nothing is allocated. The scratch space is what
 * follows the last entry of one of the queue's two heaps, which a rebuild makes again.
 *
 * death: some entries are in the ring twice and some are not in it. The deliver lock (D) is held, so
 * the next locker rebuilds the queue from the slots' words, as after any death under that lock.
 */
#ifndef SHMQ_SORT_H
#define SHMQ_SORT_H

#include "memory/handles.h"

typedef uint64_t (*slot_key)(const shmq_slot_desc *);

/* Sort the n entries from `base` by rising keys. D is held. Entries with equal keys come in any order,
 * but nothing moves if all are in order already. `beside`: the heap whose column has room for n
 * keys behind its last entry; that is so unless the sorted slots are themselves in it. Too little room
 * is garbage, and makes the queue dirty. */
void sort_slots(shmq_map *map, uint32_t *ring, uint32_t base, uint32_t n, slot_key key,
                const heap *beside);

#endif
