/*
 * nsqd's TCP protocol where it comes many at a time (nsqio/nsq nsqd/protocol_v2.go, message.go):
 *
 *   bodies of MPUB   count times int32 BE size | body
 *   runs of PUB      "PUB " topic "\n" int32 BE size | body
 *   MPUB             "MPUB " topic "\n" int32 BE size of what follows | int32 BE count | bodies
 *   runs of FIN      "FIN " 16 hex digits "\n"
 *   message frames   int32 BE size | int32 BE 2 | int64 BE timestamp | uint16 BE attempts
 *                    | 16 hex digits | body
 *
 * Also the deliveries of one connection by id, because its client names them by id. Nothing here
 * touches shared memory, except that it reads bodies.
 */
#include "base/atomics.h"
#include "base/bounds.h"
#include "format/record.h"
#include "memory/handles.h"
#include "shmq.h"
#include "shmq_wire.h"

#include <stdlib.h>
#include <string.h>

static uint8_t *put_u32(uint8_t *to, uint32_t value)
{
	value = htobe32(value);
	memcpy(to, &value, sizeof(value));
	return to + sizeof(value);
}

int shmq_wire_bodies(const shmq_wire_input *in, uint32_t n, shmq_body *bodies, uint32_t *whole,
                     uint64_t *used, int64_t *bad)
{
	const uint8_t *from = in->data;
	uint64_t at = 0;
	uint32_t i;

	*bad = 0;
	for (i = 0; i < n && in->length - at >= 4; i++) {
		int64_t size = (int32_t)get_be32(from + at);

		if (!TRUST_CHECK(size > 0 && (uint64_t)size <= in->max_msg_size)) {
			*bad = size;
			break;
		}
		if (in->length - at - 4 < (uint64_t)size)
			break;
		if (bodies)
			bodies[i] = (shmq_body){from + at + 4, (uint64_t)size};
		at += 4 + (uint64_t)size;
	}
	*whole = i;
	*used = at;
	return i < n && in->length - at >= 4 && (*bad || !get_be32(from + at)) ? SHMQ_INVALID : 0;
}

/* The input from its byte `at` on. */
static shmq_wire_input rest_of(const shmq_wire_input *in, uint64_t at)
{
	shmq_wire_input rest = *in;

	rest.data = (const uint8_t *)in->data + at;
	rest.length -= at;
	return rest;
}

uint32_t shmq_wire_publishes(const shmq_wire_input *in, uint32_t n, shmq_body *bodies,
                             uint64_t *used)
{
	const uint8_t *from = in->data;
	uint32_t i = 0, whole;
	uint64_t at = 0, size;
	int64_t bad;

	for (; i < n && in->length - at > in->line_length &&
	       !memcmp(from + at, in->line, in->line_length);
	     i++) {
		shmq_wire_input rest = rest_of(in, at + in->line_length);

		if (shmq_wire_bodies(&rest, 1, bodies + i, &whole, &size, &bad) < 0 || !whole)
			break;
		at += in->line_length + size;
	}
	*used = at;
	return i;
}

uint32_t shmq_wire_batch(const shmq_wire_input *in, uint32_t n, shmq_body *bodies, uint64_t *used)
{
	const uint8_t *from = in->data;
	uint32_t count, whole;
	uint64_t size, at = in->line_length + 8;
	shmq_wire_input rest;
	int64_t bad;

	*used = 0;
	if (in->length < at || memcmp(from, in->line, in->line_length))
		return 0;
	size = get_be32(from + in->line_length);
	count = get_be32(from + in->line_length + 4);
	/* nsqd frames by the count alone and only checks the size. The limits are below 2^31. */
	if (!TRUST_CHECK(size && size <= in->max_body_size && count &&
	                 4 + 5 * (uint64_t)count <= in->max_body_size) ||
	    count > n)
		return 0;
	rest = rest_of(in, at);
	if (shmq_wire_bodies(&rest, count, bodies, &whole, &size, &bad) < 0 || whole < count)
		return 0;
	*used = at + size;
	return count;
}

/* The value of each digit + 1. nsqd prints ids in lower case and compares them as text. */
static const uint8_t nibbles[256] = {
	['0'] = 1, ['1'] = 2,  ['2'] = 3,  ['3'] = 4,  ['4'] = 5,  ['5'] = 6,  ['6'] = 7,  ['7'] = 8,
	['8'] = 9, ['9'] = 10, ['a'] = 11, ['b'] = 12, ['c'] = 13, ['d'] = 14, ['e'] = 15, ['f'] = 16,
};

bool shmq_wire_id(const void *text, uint64_t *id)
{
	const uint8_t *from = text;
	uint64_t value = 0;
	bool right = true;

	for (unsigned i = 0; i < SHMQ_WIRE_ID; i++) {
		uint8_t nibble = nibbles[from[i]];

		right &= nibble != 0;
		value = value << 4 | ((nibble - 1) & 15);
	}
	*id = value;
	return right;
}

uint32_t shmq_wire_finishes(const void *data, uint64_t length, uint64_t *ids, uint32_t n,
                            uint64_t *used)
{
	const uint8_t *from = data;
	uint32_t i = 0;

	for (; i < n && length >= SHMQ_WIRE_FIN; i++) {
		if (memcmp(from, "FIN ", 4) != 0 || from[SHMQ_WIRE_FIN - 1] != '\n' ||
		    !shmq_wire_id(from + 4, &ids[i]))
			break;
		from += SHMQ_WIRE_FIN;
		length -= SHMQ_WIRE_FIN;
	}
	*used = (uint64_t)(from - (const uint8_t *)data);
	return i;
}

uint64_t shmq_wire_frame(const shmq_message *m, void *to)
{
	uint8_t *at = to;

	at = put_u32(at, SHMQ_WIRE_FRAME - 4 + m->length);
	at = put_u32(at, 2);
	at = put_u32(at, (uint32_t)((uint64_t)m->timestamp >> 32));
	at = put_u32(at, (uint32_t)m->timestamp);
	*at++ = (uint8_t)(m->attempts >> 8);
	*at++ = (uint8_t)m->attempts;
	at = put_id(at, m->id);
	memcpy(at, m->body, m->length);
	return SHMQ_WIRE_FRAME + m->length;
}

/* ---- deliveries by id ----------------------------------------------------------------------- */

/* Open addressing, linear probing; `word` 0: free. A delivery that timed out stays until it is
 * swept. */
typedef struct delivery {
	uint64_t id, word;
	uint32_t slot, unused;
} delivery;

struct shmq_window {
	delivery *at;
	uint32_t mask, count, sweep_at;
};

#define WINDOW_FIRST 64u

static uint32_t place_of(const shmq_window *w, uint64_t id)
{
	return (uint32_t)(id * UINT64_C(0x9e3779b97f4a7c15) >> 32) & w->mask;
}

int shmq_window_open(shmq_window **out)
{
	shmq_window *w = calloc(1, sizeof(*w));

	if (w)
		w->at = calloc(WINDOW_FIRST, sizeof(*w->at));
	if (!w || !w->at) {
		free(w);
		return SHMQ_NO_MEMORY;
	}
	w->mask = WINDOW_FIRST - 1;
	w->sweep_at = WINDOW_FIRST / 2;
	*out = w;
	return 0;
}

void shmq_window_free(shmq_window *w)
{
	free(w->at);
	free(w);
}

static void window_put(shmq_window *w, delivery d)
{
	uint32_t i = place_of(w, d.id);

	while (w->at[i].word && w->at[i].id != d.id)
		i = (i + 1) & w->mask;
	w->count += !w->at[i].word;
	w->at[i] = d;
}

/* Make a table of `size` entries with the old table's deliveries that are still in flight to the
 * consumer. Returns false if there is no memory for it. */
static bool window_remake(shmq_window *w, const shmq_consumer *c, uint32_t size)
{
	delivery *old = w->at, *fresh = calloc(size, sizeof(*fresh));
	uint32_t n = w->mask + 1;

	if (!fresh)
		return false;
	w->at = fresh;
	w->mask = size - 1;
	w->count = 0;
	for (uint32_t i = 0; i < n; i++)
		if (old[i].word && ld(&c->map->slots[old[i].slot].word) == old[i].word)
			window_put(w, old[i]);
	free(old);
	w->sweep_at = size / 2;
	return true;
}

int shmq_window_reserve(shmq_window *w, const shmq_consumer *c, uint32_t n)
{
	uint32_t size = w->mask + 1;

	if (w->count + n <= w->sweep_at)
		return 0;
	/* Half of it may have timed out. With twice the room for all, the next sweep is far away. */
	while (size / 4 < w->count + n)
		size *= 2;
	if (!window_remake(w, c, size))
		return SHMQ_NO_MEMORY;
	while (size > WINDOW_FIRST && size / 8 > w->count + n)
		size /= 2;
	if (size <= w->mask)
		(void)window_remake(w, c, size);
	return 0;
}

void shmq_window_add(shmq_window *w, const shmq_message *m)
{
	window_put(w, (delivery){m->id, m->word, m->slot, 0});
}

bool shmq_window_find(const shmq_window *w, uint64_t id, shmq_message *out)
{
	uint32_t i = place_of(w, id);

	for (; w->at[i].word; i = (i + 1) & w->mask)
		if (w->at[i].id == id) {
			*out = (shmq_message){.id = id, .word = w->at[i].word, .slot = w->at[i].slot};
			return true;
		}
	return false;
}

bool shmq_window_remove(shmq_window *w, uint64_t id, shmq_message *out)
{
	uint32_t i = place_of(w, id), hole, home;

	for (; w->at[i].word && w->at[i].id != id; i = (i + 1) & w->mask)
		;
	if (!w->at[i].word)
		return false;
	*out = (shmq_message){.id = id, .word = w->at[i].word, .slot = w->at[i].slot};
	w->count--;
	/* Close the gap, so that a probe past it does not stop there. */
	for (hole = i;;) {
		i = (i + 1) & w->mask;
		if (!w->at[i].word)
			break;
		home = place_of(w, w->at[i].id);
		if (((i - home) & w->mask) < ((i - hole) & w->mask))
			continue;
		w->at[hole] = w->at[i];
		hole = i;
	}
	w->at[hole].word = 0;
	return true;
}
