/*
 * Messages and nsqd's disk records, byte for byte (nsqio/nsq nsqd/message.go, go-diskqueue):
 *
 *   int32 BE length (26 + body) | int64 BE timestamp | uint16 BE attempts | 16 hex digits | body
 *
 * nsqd has no place for what else belongs to a message: its properties, when it expires, its
 * failures. With any of these, an envelope takes the body's place:
 *
 *   8 bytes of magic | uint32 LE length of the entries | entries | body
 *
 * The entries are those of a block of properties (shmq.h): first the message's own, then shmq's, whose
 * names begin with "shmq-". A body that itself begins with the magic gets an envelope without
 * entries, so that it is not mistaken for one.
 */
#include "format/record.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "memory/properties.h"
#include "shmq.h"
#include "shmq_supervisor.h"

static uint16_t get_be16(const uint8_t *from)
{
	uint16_t value;

	memcpy(&value, from, sizeof(value));
	return be16toh(value);
}

static uint64_t get_be64(const uint8_t *from)
{
	uint64_t value;

	memcpy(&value, from, sizeof(value));
	return be64toh(value);
}

/* 0xf5 is in no UTF-8 text, so no text is mistaken for an envelope. */
static const uint8_t magic[8] = {0xf5, 's', 'h', 'm', 'q', 'p', 1, '\n'};

static const char expires_name[] = "shmq-expires";   /* i64 LE: CLOCK_REALTIME ns */
static const char failures_name[] = "shmq-failures"; /* u16 LE: failures; u8: flags of the slot */
static const char seal_name[] = "shmq-seal";         /* 16 bytes, of seal.h */
#define EXPIRES_BYTES 8u
#define FAILURES_BYTES 3u
#define ENTRY_BYTES(name, value) (PROPERTY_HEAD + (uint32_t)sizeof(name) - 1 + (value))

_Static_assert(sizeof(magic) + 4 == SHMQ_ENVELOPE, "envelope");
_Static_assert(SHMQ_ENVELOPE + ENTRY_BYTES(expires_name, EXPIRES_BYTES) +
                               ENTRY_BYTES(failures_name, FAILURES_BYTES) +
                               ENTRY_BYTES(seal_name, SEAL_BYTES) <=
                       SHMQ_RECORD_MORE,
               "a record may be longer than max_msg_size by this much");

#define FAILURE_FLAGS (RECORD_FLAGS & ~(unsigned)SHMQ_SLOT_EXPIRES)

static bool has_magic(const uint8_t *body, uint64_t length)
{
	return length >= sizeof(magic) && !memcmp(body, magic, sizeof(magic));
}

record record_of(const shmq_slot_desc *slot, const uint8_t *body, uint32_t length,
                 uint32_t properties)
{
	record r = {.block = body - properties,
	            .body = body,
	            .length = length,
	            .timestamp = slot->timestamp,
	            .id = slot->id,
	            .properties = properties,
	            .attempts = slot->attempts,
	            .sealed = slot->flags & SHMQ_SLOT_PROPERTIES && slot->properties & SHMQ_SLOT_SEALED,
	            .flags = once(slot->flags) & RECORD_FLAGS};

	if (r.flags & SHMQ_SLOT_EXPIRES)
		r.expires = slot->expires;
	else
		r.flags &= (uint8_t)~SHMQ_SLOT_WAS_DUE; /* the time when it was due is not written */
	if (r.flags & SHMQ_SLOT_FAILED)
		r.failures = (uint16_t)(ld(&slot->failures) >> 16);
	return r;
}

/* Bytes of shmq's own entries. */
static uint32_t own_bytes(const record *from)
{
	return (from->flags & SHMQ_SLOT_EXPIRES ? ENTRY_BYTES(expires_name, EXPIRES_BYTES) : 0) +
	       (from->flags & FAILURE_FLAGS ? ENTRY_BYTES(failures_name, FAILURES_BYTES) : 0) +
	       (from->sealed ? ENTRY_BYTES(seal_name, SEAL_BYTES) : 0);
}

static bool needs_envelope(const record *from)
{
	return from->properties || from->flags || from->sealed || has_magic(from->body, from->length);
}

uint64_t record_bytes(const record *from)
{
	return SHMQ_RECORD_HEAD + from->length +
	       (needs_envelope(from) ? SHMQ_ENVELOPE + from->properties + own_bytes(from) : 0);
}

static uint8_t *put_le(uint8_t *to, uint64_t value, unsigned bytes)
{
	for (unsigned i = 0; i < bytes; i++)
		*to++ = (uint8_t)(value >> 8 * i);
	return to;
}

static uint64_t get_le(const uint8_t *from, unsigned bytes)
{
	uint64_t value = 0;

	for (unsigned i = 0; i < bytes; i++)
		value |= (uint64_t)from[i] << 8 * i;
	return value;
}

static uint8_t *own_write(uint8_t *to, const record *from)
{
	uint8_t value[EXPIRES_BYTES];

	if (from->flags & SHMQ_SLOT_EXPIRES) {
		put_le(value, (uint64_t)from->expires, EXPIRES_BYTES);
		to = property_write(
				to, &(shmq_property){expires_name, value, sizeof(expires_name) - 1, EXPIRES_BYTES});
	}
	if (from->flags & FAILURE_FLAGS) {
		*put_le(value, from->failures, 2) = from->flags & FAILURE_FLAGS;
		to = property_write(to, &(shmq_property){failures_name, value, sizeof(failures_name) - 1,
		                                         FAILURES_BYTES});
	}
	if (from->sealed)
		to = property_write(
				to, &(shmq_property){seal_name, from->tag, sizeof(seal_name) - 1, SEAL_BYTES});
	return to;
}

static uint8_t *envelope_write(uint8_t *to, const record *from)
{
	memcpy(to, magic, sizeof(magic));
	to = put_le(to + sizeof(magic), from->properties + own_bytes(from), 4);
	if (from->properties)
		memcpy(to, from->block, from->properties);
	return own_write(to + from->properties, from);
}

void record_write(uint8_t *to, uint64_t size, const record *from)
{
	uint32_t length = htobe32((uint32_t)size - 4u);
	uint64_t timestamp = htobe64((uint64_t)from->timestamp);
	uint16_t attempts = htobe16(from->attempts);
	uint8_t *body = to + SHMQ_RECORD_HEAD;

	memcpy(to, &length, sizeof(length));
	memcpy(to + 4, &timestamp, sizeof(timestamp));
	memcpy(to + 12, &attempts, sizeof(attempts));
	(void)put_id(to + 14, from->id);
	if (!TRUST_CHECK(record_bytes(from) == size)) {
		memset(body, 0, size - SHMQ_RECORD_HEAD);
		return;
	}
	if (needs_envelope(from))
		body = envelope_write(body, from);
	memcpy(body, from->body, from->length);
}

/* Take one of shmq's own entries into the record. One that another version wrote is skipped. */
static void own_read(const shmq_property *p, record *out)
{
	const uint8_t *value = p->value;

#define IS(text, bytes)                                                                            \
	(p->length == (bytes) && p->name_length == sizeof(text) - 1 &&                                 \
	 !memcmp(p->name, text, sizeof(text) - 1))
	if (IS(expires_name, EXPIRES_BYTES)) {
		out->expires = (int64_t)get_le(value, EXPIRES_BYTES);
		out->flags |= SHMQ_SLOT_EXPIRES;
	} else if (IS(failures_name, FAILURES_BYTES)) {
		out->failures = (uint16_t)get_le(value, 2);
		out->flags |= value[2] & FAILURE_FLAGS;
	} else if (IS(seal_name, SEAL_BYTES)) {
		out->sealed = true;
		memcpy(out->tag, value, SEAL_BYTES);
	}
#undef IS
}

/* Separate an envelope from the body. A body in which it is not whole stays as it is. */
static void envelope_open(record *out)
{
	const uint8_t *entries = out->body + SHMQ_ENVELOPE;
	record found = *out;
	uint64_t length, at = 0, from;
	shmq_property p;
	bool own = false;
	int r;

	if (out->length < SHMQ_ENVELOPE)
		return;
	length = get_le(out->body + sizeof(magic), 4);
	if (length > out->length - SHMQ_ENVELOPE)
		return;
	while (from = at, (r = shmq_property_next(entries, length, &at, &p)) > 0) {
		if (own && !property_is_internal(&p))
			return;
		if (!own && (own = property_is_internal(&p)))
			found.properties = (uint32_t)from;
		if (own)
			own_read(&p, &found);
	}
	if (!own)
		found.properties = (uint32_t)length;
	if (r < 0 || found.properties > SHMQ_PROPERTIES_MOST)
		return;
	found.block = entries;
	found.body = entries + length;
	found.length = out->length - SHMQ_ENVELOPE - length;
	*out = found;
}

/* To nsqd an id is 16 opaque bytes. One that is not hexadecimal becomes a number that is made
 * from it. */
static uint64_t read_id(const uint8_t *from)
{
#define DIGIT 0x10u
	static const uint8_t values[256] = {
		['0'] = DIGIT,      ['1'] = DIGIT | 1,  ['2'] = DIGIT | 2,  ['3'] = DIGIT | 3,
		['4'] = DIGIT | 4,  ['5'] = DIGIT | 5,  ['6'] = DIGIT | 6,  ['7'] = DIGIT | 7,
		['8'] = DIGIT | 8,  ['9'] = DIGIT | 9,  ['a'] = DIGIT | 10, ['b'] = DIGIT | 11,
		['c'] = DIGIT | 12, ['d'] = DIGIT | 13, ['e'] = DIGIT | 14, ['f'] = DIGIT | 15,
	};
	uint64_t id = 0;
	unsigned all = DIGIT;

	for (int i = 0; i < 16; i++) {
		unsigned value = values[from[i]];

		all &= value;
		id = id << 4 | (value & 15);
	}
	if (all & DIGIT)
		return id;
#undef DIGIT
	id = UINT64_C(14695981039346656037);
	for (int i = 0; i < 16; i++)
		id = (id ^ from[i]) * UINT64_C(1099511628211);
	return id;
}

int record_size(const uint8_t *from, uint64_t length, uint64_t max_msg_size, uint64_t *size)
{
	if (length < 4)
		return 0;
	*size = (uint64_t)get_be32(from) + 4;
	if (!TRUST_CHECK(*size >= SHMQ_RECORD_HEAD &&
	                 *size <= max_msg_size + SHMQ_RECORD_MORE + SHMQ_RECORD_HEAD))
		return -1;
	return length >= *size;
}

int record_read(const uint8_t *from, uint64_t length, uint64_t max_msg_size, record *out,
                uint64_t *used)
{
	uint64_t size;
	int r = record_size(from, length, max_msg_size, &size);

	if (r <= 0)
		return r;
	*out = (record){.timestamp = (int64_t)get_be64(from + 4),
	                .attempts = get_be16(from + 12),
	                .id = read_id(from + 14),
	                .body = from + SHMQ_RECORD_HEAD,
	                .length = size - SHMQ_RECORD_HEAD};
	if (__builtin_expect(has_magic(out->body, out->length), 0))
		envelope_open(out);
	*used = size;
	return 1;
}

int shmq_records_properties(const void *records, uint64_t length, uint32_t count, uint64_t *size,
                            const shmq_blocks *to)
{
	const uint8_t *from = records;
	uint64_t used = 0, bytes, at = 0, most = to ? *size : INT32_MAX;
	record rec;

	for (uint32_t i = 0; i < count; i++) {
		if (record_read(from + used, length - used, UINT32_MAX, &rec, &bytes) <= 0)
			return SHMQ_CORRUPT;
		if (rec.properties > most - at)
			return SHMQ_TOO_BIG;
		if (to) {
			to->offsets[i] = (int32_t)at;
			if (rec.properties)
				memcpy(to->blocks + at, rec.block, rec.properties);
		}
		at += rec.properties;
		used += bytes;
	}
	if (used != length)
		return SHMQ_CORRUPT;
	if (to)
		to->offsets[count] = (int32_t)at;
	*size = at;
	return 0;
}

void shmq_record_split(const void *data, uint64_t length, shmq_body *properties, shmq_body *body)
{
	record r = {.block = data, .body = data, .length = length};

	if (has_magic(r.body, r.length))
		envelope_open(&r);
	*properties = (shmq_body){r.block, r.properties};
	*body = (shmq_body){r.body, r.length};
}

uint64_t shmq_slot_record(const void *slot, const void *content, uint64_t length,
                          const uint8_t *key, const char *topic, void *to)
{
	shmq_slot_desc copy;
	uint32_t properties = 0;
	uint64_t size;
	record r;

	memcpy(&copy, slot, sizeof(copy));
	if (copy.flags & SHMQ_SLOT_PROPERTIES &&
	    properties_can_be(copy.flags, copy.properties, (uint32_t)length))
		properties = copy.properties & ~SHMQ_SLOT_SEALED;
	r = record_of(&copy, (const uint8_t *)content + properties, (uint32_t)length - properties,
	              properties);
	r.sealed &= key != NULL;
	size = record_bytes(&r);
	if (to && r.sealed)
		record_seal(&r, key, topic);
	if (to)
		record_write(to, size, &r);
	return size;
}

void record_seal(record *r, const uint8_t *key, const char *topic)
{
	if (r->sealed)
		seal_make(key, topic, r->id, r->body, r->length, r->tag);
}

bool record_is_sealed(const record *r, const uint8_t *key, const char *topic)
{
	return r->sealed && seal_fits(key, topic, r->id, r->body, r->length, r->tag);
}

void record_place(shmq_slot_desc *s, uint8_t *to, const record *from, bool sealed)
{
	if (from->properties)
		memcpy(to, from->block, from->properties);
	memcpy(to + from->properties, from->body, from->length);
	s->id = from->id;
	s->timestamp = from->timestamp;
	s->attempts = from->attempts;
	s->length = (uint32_t)record_length(from);
	s->flags = from->flags | (from->properties || sealed ? SHMQ_SLOT_PROPERTIES : 0);
	if (from->properties || sealed)
		s->properties = from->properties | (sealed ? SHMQ_SLOT_SEALED : 0);
	if (from->flags & SHMQ_SLOT_EXPIRES)
		s->expires = from->expires;
	if (from->flags & SHMQ_SLOT_FAILED)
		/* its next delivery has another generation, so that one counts */
		st(&s->failures,
		   (uint32_t)from->failures << 16 | (uint16_t)SHMQ_GENERATION_OF(ld(&s->word)));
	s->after = 0;
	s->heap = SHMQ_NONE;
}

int shmq_records_scan(const void *data, uint64_t length, uint64_t max_msg_size, uint32_t most,
                      uint32_t *records, uint64_t *used, bool *damaged)
{
	const uint8_t *at = data;
	uint64_t size;
	int r = 0;

	*records = 0;
	*used = 0;
	while (*used < length && *records < most &&
	       (r = record_size(at + *used, length - *used, max_msg_size, &size)) > 0) {
		*used += size;
		++*records;
	}
	*damaged = r < 0;
	return 0;
}

void shmq_records_leasable(const void *data, uint64_t length, uint64_t max_bytes, bool at_least,
                           uint32_t *records, uint64_t *bytes, uint64_t *used)
{
	const uint8_t *at = data;
	uint64_t size;
	record rec;

	*records = 0;
	*bytes = *used = 0;
	while (record_read(at + *used, length - *used, UINT32_MAX, &rec, &size) > 0) {
		if (rec.flags & (SHMQ_SLOT_EXPIRES | SHMQ_SLOT_CONVICTED))
			return;
		if ((*records || !at_least) && (*bytes > max_bytes || rec.length > max_bytes - *bytes))
			return;
		*bytes += rec.length;
		*used += size;
		++*records;
	}
}

int shmq_records_decode(const void *records, uint64_t length, uint32_t count,
                        const shmq_columns *to)
{
	const uint8_t *at = records;
	uint64_t used = 0, size, body = 0;
	record rec;

	if (length > INT32_MAX || (uint64_t)count * SHMQ_RECORD_HEAD > length)
		return SHMQ_CORRUPT;
	for (uint32_t i = 0; i < count; i++) {
		if (record_read(at + used, length - used, UINT32_MAX, &rec, &size) <= 0 ||
		    rec.length > length - (uint64_t)count * SHMQ_RECORD_HEAD - body)
			return SHMQ_CORRUPT;
		to->ids[i] = rec.id;
		to->timestamps[i] = rec.timestamp;
		to->attempts[i] = (uint16_t)(rec.attempts + 1);
		to->offsets[i] = (int32_t)body;
		memcpy(to->data + body, rec.body, rec.length);
		body += rec.length;
		used += size;
	}
	to->offsets[count] = (int32_t)body;
	return used == length ? 0 : SHMQ_CORRUPT;
}
