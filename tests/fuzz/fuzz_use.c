/*
 * A live queue, overwritten in up to 16 words anywhere, and a program of calls. Input: how many
 * words; for each its place (region, word, value: 1, 2 and 4 bytes; the word's upper 3 bits: what
 * the value is); then a byte for each call. Nothing may leave the segments, hang, or touch the
 * queue beside.
 */
#include "../native/scene_use.h"

#include <sys/resource.h>

#define PER_WORD 7
#define CALLS                                                                                      \
	12               /* the first ones find the garbage: those behind them find what it was    \
        mended to */
#define HOW_SHIFT 13 /* no region has more than 2^13 words */

/* A lock that looks held is waited for, rightly; and glibc follows the pointers in one that is
 * held. */
static bool is_a_lock(const uint8_t *at)
{
	const shmq_lock_desc *locks[] = {&w->supervisor->d->registry, &s->map[0]->q->deliver,
	                                 &s->map[1]->q->deliver, &s->map[2]->q->deliver};

	for (size_t i = 0; i < 4; i++)
		if (at >= (const uint8_t *)locks[i] && at < (const uint8_t *)(locks[i] + 1))
			return true;
	for (uint32_t i = 0; i < 4; i++) {
		const uint8_t *p = (const uint8_t *)&w->supervisor->topics[i].publish;

		if (at >= p && at < p + sizeof(shmq_lock_desc))
			return true;
	}
	return false;
}

/* Garbage that might be true gets further than any number: what is there, changed a little; an
 * index; what stands elsewhere in the same region or in another one. */
static uint32_t garbage(uint32_t how, uint32_t value, const struct scene_part *part,
                        const uint8_t *to)
{
	const struct scene_part *other = &s->parts[value % s->parts_count];
	uint32_t there;

	memcpy(&there, to, sizeof(there));
	switch (how) {
	case 3:
		return there + (uint32_t)(int8_t)value;
	case 4:
		return there ^ value;
	case 5:
		memcpy(&there, part->at + 4 * (value % (part->bytes / 4)), sizeof(there));
		return there;
	case 6:
		memcpy(&there, other->at + 4 * ((value >> 8) % (other->bytes / 4)), sizeof(there));
		return there;
	case 7:
		return value % 256;
	default:
		return value;
	}
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc;
	(void)argv;
	scene_unmaps_every = 64;
	s = scene_make();
	w = s->w;
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	bool beside = true;
	size_t words, at = 1;

	if (!size)
		return 0;
	scene_restore(s);
	words = data[0] % 17;
	for (size_t i = 0; i < words && size - at >= PER_WORD; i++, at += PER_WORD) {
		const struct scene_part *part = &s->parts[data[at] % s->parts_count];
		uint32_t word = (uint32_t)(data[at + 1] | data[at + 2] << 8), value;
		uint8_t *to;

		if (part->at == (uint8_t *)w->supervisor->clients)
			continue;
		to = part->at + 4 * (word % (1u << HOW_SHIFT) % (part->bytes / 4));
		if (is_a_lock(to))
			continue;
		memcpy(&value, data + at + 3, sizeof(value));
		value = garbage(word >> HOW_SHIFT, value, part, to);
		memcpy(to, &value, sizeof(value));
		/* Garbage in the other queue, or in what all queues share, may spoil the other queue. */
		beside &= (to >= s->map[0]->base && to < s->map[0]->base + s->map[0]->size) ||
		          (to >= s->map[1]->base && to < s->map[1]->base + s->map[1]->size);
	}
	for (size_t n = 0; at < size && n < CALLS; at++, n++)
		operations[data[at] % OPERATIONS]();
	if (beside)
		the_one_beside_has_all();
	return 0;
}
