/* The envelope of a record: what belongs to a message beside its body, and bodies that look like it. */
#include "harness.h"

static const uint8_t magic[] = {0xf5, 's', 'h', 'm', 'q', 'p', 1, '\n'};

static uint64_t add(uint8_t *block, uint64_t length, const char *name, const char *value)
{
	shmq_property p = {name, value, (uint32_t)strlen(name), (uint32_t)strlen(value)};

	EQUAL(shmq_property_add(block, &length, &p), 0);
	return length;
}

/* The record of `from`, written and read again. */
static record again(uint8_t *to, const record *from, uint64_t *size)
{
	uint64_t used;
	record r;

	*size = record_bytes(from);
	record_write(to, *size, from);
	EQUAL(record_read(to, *size, 1 << 20, &r, &used), 1);
	EQUAL(used, *size);
	return r;
}

static void same(const record *x, const record *y)
{
	EQUAL(x->id, y->id);
	EQUAL(x->timestamp, y->timestamp);
	EQUAL(x->attempts, y->attempts);
	EQUAL(x->flags, y->flags);
	EQUAL(x->failures, y->failures);
	EQUAL(x->expires, y->expires);
	EQUAL(x->properties, y->properties);
	EQUAL(x->length, y->length);
	EQUAL(x->sealed, y->sealed);
	CHECK(!x->sealed || !memcmp(x->tag, y->tag, SEAL_BYTES));
	CHECK(!memcmp(x->body, y->body, x->length));
	CHECK(!x->properties || !memcmp(x->block, y->block, x->properties));
}

static void every_part_comes_back_from_a_record(void)
{
	static const uint8_t flags[] = {
		0,
		SHMQ_SLOT_EXPIRES,
		SHMQ_SLOT_FAILED,
		SHMQ_SLOT_SUSPECT,
		SHMQ_SLOT_FAILED | SHMQ_SLOT_CONVICTED | SHMQ_DEAD_REJECTED << SHMQ_SLOT_REASON_SHIFT,
		SHMQ_SLOT_EXPIRES | SHMQ_SLOT_FAILED | SHMQ_SLOT_SUSPECT | SHMQ_SLOT_CONVICTED |
				SHMQ_DEAD_OVERFLOW << SHMQ_SLOT_REASON_SHIFT};
	uint8_t block[SHMQ_PROPERTIES_MOST], out[2 * SHMQ_PROPERTIES_MOST];
	uint64_t length = add(block, 0, "key", "17"), size;

	for (size_t i = 0; i < sizeof(flags); i++)
		for (int with = 0; with < 4; with++) {
			record r = {.block = block,
			            .body = (const uint8_t *)"the body",
			            .length = i % 2 ? 8 : 0,
			            .timestamp = 5,
			            .id = 6,
			            .properties = with & 1 ? (uint32_t)length : 0,
			            .sealed = with & 2,
			            .attempts = 7,
			            .flags = flags[i]};
			record back;

			if (r.flags & SHMQ_SLOT_EXPIRES)
				r.expires = INT64_MAX - 3;
			if (r.flags & SHMQ_SLOT_FAILED)
				r.failures = 65535;
			record_seal(&r, (const uint8_t *)"a key that has thirty-two bytes..", "t");
			back = again(out, &r, &size);
			same(&r, &back);
			EQUAL(record_is_sealed(&back, (const uint8_t *)"a key that has thirty-two bytes..",
			                       "t"),
			      r.sealed);
			CHECK(!record_is_sealed(&back, (const uint8_t *)"A key that has thirty-two bytes..",
			                        "t"));
			CHECK(size <= SHMQ_RECORD_HEAD + r.length + r.properties + SHMQ_RECORD_MORE);
			EQUAL(size == SHMQ_RECORD_HEAD + r.length, !with && !r.flags);
		}
}

static void golden_envelope(void)
{
	static const uint8_t body[] = {0xf5, 's', 'h', 'm', 'q', 'p', 1, '\n', 8,   0,   0,
	                               0,    3,   'k', 'e', 'y', 2,   0, '1',  '7', 'h', 'i'};
	uint8_t block[SHMQ_PROPERTIES_MOST], out[100];
	record r = {.block = block,
	            .body = (const uint8_t *)"hi",
	            .length = 2,
	            .properties = (uint32_t)add(block, 0, "key", "17")};
	uint64_t size;

	(void)again(out, &r, &size);
	EQUAL(size, SHMQ_RECORD_HEAD + sizeof(body));
	CHECK(!memcmp(out + SHMQ_RECORD_HEAD, body, sizeof(body)));
}

/* A body is never mistaken for an envelope, not even one that is one. */
static void a_body_with_the_magic_survives(void)
{
	uint8_t body[200] = {0}, out[400];
	uint64_t size, entries = 0;
	record r = {.body = body}, back;

	memcpy(body, magic, sizeof(magic));
	entries = add(body + SHMQ_ENVELOPE, 0, "key", "17");
	body[8] = (uint8_t)entries;
	for (r.length = 0; r.length < 60; r.length++) {
		back = again(out, &r, &size);
		same(&r, &back);
		EQUAL(size, SHMQ_RECORD_HEAD + r.length + (r.length >= 8 ? SHMQ_ENVELOPE : 0));
	}
}

/* A record of a nsqd, whose body begins with the magic. */
static uint64_t foreign(uint8_t *to, const uint8_t *body, uint32_t length)
{
	record r = {.body = (const uint8_t *)"", .length = 0, .id = 9};
	uint32_t all = htobe32(26 + length);

	record_write(to, SHMQ_RECORD_HEAD, &r);
	memcpy(to, &all, 4);
	memcpy(to + SHMQ_RECORD_HEAD, body, length);
	return SHMQ_RECORD_HEAD + length;
}

static void an_envelope_that_is_not_whole_is_a_body(void)
{
	uint8_t body[64 + SHMQ_PROPERTIES_MOST] = {0}, record_bytes_of[100 + sizeof(body)];
	uint64_t entries, used, size;
	record r;

	memcpy(body, magic, sizeof(magic));
	entries = add(body + SHMQ_ENVELOPE, 0, "key", "17");
	for (unsigned claimed = 0; claimed < 30; claimed++) {
		bool whole = claimed == 0 || claimed == entries;
		uint8_t *copy;

		body[8] = (uint8_t)claimed;
		size = foreign(record_bytes_of, body, (uint32_t)(SHMQ_ENVELOPE + entries + 3));
		copy = malloc(size); /* so that a read beyond is caught */
		memcpy(copy, record_bytes_of, size);
		EQUAL(record_read(copy, size, 1000, &r, &used), 1);
		EQUAL(r.properties, claimed == entries ? entries : 0);
		EQUAL(r.length, whole ? entries + 3 - claimed : SHMQ_ENVELOPE + entries + 3);
		free(copy);
	}
	body[8] = (uint8_t)entries;
	body[SHMQ_ENVELOPE + 1] = 'K'; /* no name */
	size = foreign(record_bytes_of, body, (uint32_t)(SHMQ_ENVELOPE + entries + 3));
	EQUAL(record_read(record_bytes_of, size, 1000, &r, &used), 1);
	EQUAL(r.length, SHMQ_ENVELOPE + entries + 3);
	memset(body + 8, 0xff, 4);
	EQUAL(record_read(record_bytes_of, foreign(record_bytes_of, body, 40), 1000, &r, &used), 1);
	EQUAL(r.length, 40);
}

/* Own entries come last, one that this version does not know is skipped, and a known one with another
 * length does not count. */
static void own_entries_come_last(void)
{
	uint8_t body[200], out[300];
	shmq_property later = {"shmq-later", "abc", 10, 3}, odd = {"shmq-expires", "1234567", 12, 7},
				  key = {"key", "17", 3, 2};
	uint8_t *entries = body + SHMQ_ENVELOPE, *end;
	uint64_t used;
	record r;

	memcpy(body, magic, sizeof(magic));
	memset(body + 8, 0, 4);
	end = property_write(property_write(property_write(entries, &key), &later), &odd);
	body[8] = (uint8_t)(end - entries);
	*end++ = 'x';
	EQUAL(record_read(out, foreign(out, body, (uint32_t)(end - body)), 1000, &r, &used), 1);
	EQUAL(r.properties, 8);
	EQUAL(r.flags, 0);
	EQUAL(r.length, 1);
	end = property_write(property_write(entries, &later), &key);
	body[8] = (uint8_t)(end - entries);
	EQUAL(record_read(out, foreign(out, body, (uint32_t)(end - body)), 1000, &r, &used), 1);
	EQUAL(r.properties, 0);
	EQUAL(r.length, end - body);
}

/* If something overwrites a message between its measure and its record, the record keeps its size. */
static void a_record_keeps_its_size(void)
{
	uint8_t body[40] = {0}, out[SHMQ_RECORD_HEAD + 40 + SHMQ_ENVELOPE];
	record r = {.body = body, .length = 40, .id = 3}, back;
	uint64_t size = record_bytes(&r), used;

	memcpy(body, magic, sizeof(magic));
	CHECK(record_bytes(&r) > size);
	memset(out, 0x55, sizeof(out));
	record_write(out, size, &r);
	EQUAL(out[size], 0x55);
	EQUAL(record_read(out, size, 1000, &back, &used), 1);
	EQUAL(back.id, 3);
	EQUAL(back.length, 40);
	EQUAL(back.body[0], 0);
}

/* The readers for files and for damaged segments, with memory that ends where the bytes end. */
static void the_readers_of_records_stay_inside(void)
{
	uint8_t block[SHMQ_PROPERTIES_MOST], records[300], *copy;
	uint64_t length = add(block, 0, "key", "17"), size, most;
	record with = {.block = block,
	               .body = (const uint8_t *)"one",
	               .length = 3,
	               .properties = (uint32_t)length},
		   without = {.body = (const uint8_t *)"two", .length = 3};
	int32_t offsets[3];
	uint8_t blocks[20];
	shmq_blocks to = {offsets, blocks};
	shmq_body properties, body;

	size = record_bytes(&with);
	record_write(records, size, &with);
	record_write(records + size, record_bytes(&without), &without);
	size += record_bytes(&without);
	for (uint64_t n = 0; n <= size; n++) {
		copy = malloc(n ? n : 1);
		memcpy(copy, records, n);
		EQUAL(shmq_records_properties(copy, n, 2, &most, NULL), n == size ? 0 : SHMQ_CORRUPT);
		shmq_record_split(copy, n, &properties, &body);
		EQUAL(properties.length + body.length, n);
		free(copy);
	}
	most = sizeof(blocks);
	EQUAL(shmq_records_properties(records, size, 2, &most, &to), 0);
	EQUAL(most, length);
	EQUAL(offsets[1], length);
	EQUAL(offsets[2], length);
	CHECK(!memcmp(blocks, block, length));
	most = length - 1;
	EQUAL(shmq_records_properties(records, size, 2, &most, &to), SHMQ_TOO_BIG);
}

static void what_may_be_leased_ends_at_what_expires_by_itself(void)
{
	uint8_t block[SHMQ_PROPERTIES_MOST], records[400];
	const record plain = {.body = (const uint8_t *)"three", .length = 5};
	const record with = {.block = block,
	                     .body = (const uint8_t *)"one",
	                     .length = 3,
	                     .properties = (uint32_t)add(block, 0, "key", "17")};
	record other = {.body = (const uint8_t *)"x", .length = 1, .expires = 5};
	const uint64_t one = record_bytes(&with), three = record_bytes(&plain);
	static const uint8_t stops[] = {SHMQ_SLOT_EXPIRES, SHMQ_SLOT_CONVICTED};
	uint64_t size, bytes, used;
	uint32_t n;

	for (uint32_t i = 0; i < 2; i++) {
		other.flags = stops[i];
		record_write(records, one, &with);
		record_write(records + one, three, &plain);
		record_write(records + one + three, record_bytes(&other), &other);
		size = one + three + record_bytes(&other);
		shmq_records_leasable(records, size, UINT64_MAX, false, &n, &bytes, &used);
		CHECK(n == 2 && bytes == 8 && used == one + three);
		shmq_records_leasable(records + used, size - used, UINT64_MAX, true, &n, &bytes, &used);
		CHECK(!n && !bytes && !used);
	}
	other.flags = SHMQ_SLOT_FAILED | SHMQ_SLOT_SUSPECT;
	record_write(records + one + three, record_bytes(&other), &other);
	size = one + three + record_bytes(&other);
	shmq_records_leasable(records, size, 9, false, &n, &bytes, &used);
	CHECK(n == 3 && bytes == 9 && used == size);
	shmq_records_leasable(records, size, 7, false, &n, &bytes, &used);
	CHECK(n == 1 && bytes == 3 && used == one);
	shmq_records_leasable(records, size, 2, true, &n, &bytes, &used);
	CHECK(n == 1 && bytes == 3 && used == one);
	shmq_records_leasable(records, size, 2, false, &n, &bytes, &used);
	CHECK(!n && !bytes && !used);
	shmq_records_leasable(records, size - 1, 9, false, &n, &bytes, &used);
	CHECK(n == 2); /* the last one is not whole */
}

/* A slot may say anything: its record has the bytes that are left, and no others. */
static void a_record_is_made_of_any_slot(void)
{
	static const uint32_t sizes[] = {0, 1, 8, 9, 4096, 4097, UINT32_MAX};
	uint64_t content = 9;

	for (unsigned flags = 0; flags < 256; flags++)
		for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
			shmq_slot_desc slot = {.id = 7, .flags = (uint8_t)flags, .properties = sizes[i]};
			uint8_t *bytes = malloc(content), *to;
			uint64_t size;

			memcpy(bytes, "\1k\4\0abcdX", content);
			size = shmq_slot_record(&slot, bytes, content, NULL, "t", NULL);
			CHECK(size >= SHMQ_RECORD_HEAD + content &&
			      size <= SHMQ_RECORD_HEAD + content + SHMQ_RECORD_MORE);
			to = malloc(size);
			EQUAL(shmq_slot_record(&slot, bytes, content, NULL, "t", to), size);
			free(to);
			free(bytes);
		}
}

int main(void)
{
	the_readers_of_records_stay_inside();
	what_may_be_leased_ends_at_what_expires_by_itself();
	a_record_is_made_of_any_slot();
	every_part_comes_back_from_a_record();
	golden_envelope();
	a_body_with_the_magic_survives();
	an_envelope_that_is_not_whole_is_a_body();
	own_entries_come_last();
	a_record_keeps_its_size();
	return 0;
}
