/*
 * Properties: any bytes in place of a block, and in place of a record's body, which may be an
 * envelope. Input: the bytes; those of an envelope are put behind its magic, too. A plain reader of
 * the format finds the same entries, and nobody reads beyond the end.
 */
#include "../native/harness.h"

#define MOST 8192u

static uint8_t *wall; /* nobody may read from here on */

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc;
	(void)argv;
	wall = (uint8_t *)mmap(NULL, 2 * MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
	                       0) +
	       MOST;
	EQUAL(mprotect(wall, MOST, PROT_NONE), 0);
	return 0;
}

/* u8 length of the name | name | u16 LE length of the value | value. Returns the bytes of the entry
 * at the beginning; 0 if it is not whole or its name is none. */
static uint64_t plainly(const uint8_t *data, uint64_t left, bool *internal)
{
	uint64_t name = left ? data[0] : 0, value;

	if (!name || name > 64 || left < 3 + name)
		return 0;
	for (uint64_t i = 1; i <= name; i++)
		if (!data[i] || !strchr("abcdefghijklmnopqrstuvwxyz0123456789._-", data[i]))
			return 0;
	value = data[1 + name] | (uint64_t)data[2 + name] << 8;
	*internal = name >= 5 && !memcmp(data + 1, "shmq-", 5);
	return left - 3 - name < value ? 0 : 3 + name + value;
}

/* The entries of a block: bytes of the message's own, and of all. Returns false if it is no block. */
static bool block_of(const uint8_t *data, uint64_t length, uint64_t *own, uint64_t *all)
{
	bool mixed = false, internal, any = false;
	uint64_t bytes;

	for (*own = *all = 0; *all < length; *all += bytes) {
		bytes = plainly(data + *all, length - *all, &internal);
		if (!bytes)
			return false;
		any |= internal;
		mixed |= any && !internal;
		*own += any ? 0 : bytes;
	}
	return !mixed;
}

static void block(const uint8_t *data, size_t size)
{
	uint64_t at = 0, own, all, before = 0;
	shmq_property p;
	int r;

	while ((r = shmq_property_next(data, size, &at, &p)) > 0) {
		bool internal;

		CHECK((const uint8_t *)p.value + p.length <= wall && at > before && at <= size);
		EQUAL(plainly(data + before, size - before, &internal), at - before);
		before = at;
	}
	(void)block_of(data, size, &own, &all);
	EQUAL(all, before);
	EQUAL(r, all < size ? -1 : 0);
	r = shmq_properties_check(data, size);
	EQUAL(!r, size <= SHMQ_PROPERTIES_MOST && all == size && own == size);
}

/* 8 bytes of magic | u32 LE length of the entries | entries | body */
static void envelope(const uint8_t *data, size_t size)
{
	static const uint8_t magic[] = {0xf5, 's', 'h', 'm', 'q', 'p', 1, '\n'};
	uint64_t own = 0, all = 0, length = 0;
	bool is_one = size >= 12 && !memcmp(data, magic, sizeof(magic));
	shmq_body properties, body;

	for (int i = 0; is_one && i < 4; i++)
		length |= (uint64_t)data[8 + i] << 8 * i;
	is_one = is_one && length <= size - 12 && block_of(data + 12, length, &own, &all) &&
	         own <= SHMQ_PROPERTIES_MOST;
	shmq_record_split(data, size, &properties, &body);
	EQUAL(properties.length, is_one ? own : 0);
	EQUAL(body.length, is_one ? size - 12 - length : size);
	CHECK((const uint8_t *)body.data + body.length == data + size);
	CHECK(!properties.length || properties.data == data + 12);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
	static const uint8_t magic[] = {0xf5, 's', 'h', 'm', 'q', 'p', 1, '\n'};

	if (size > MOST - sizeof(magic))
		return 0;
	memcpy(wall - size, input, size);
	memcpy(wall - size - sizeof(magic), magic, sizeof(magic));
	block(wall - size, size);
	envelope(wall - size, size);
	envelope(wall - size - sizeof(magic), size + sizeof(magic));
	return 0;
}
