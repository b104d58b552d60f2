/* Properties: the block in memory, and on its ways through a queue. */
#include "harness.h"

static const uint8_t magic[] = {0xf5, 's', 'h', 'm', 'q', 'p', 1, '\n'};

/* ---- blocks --------------------------------------------------------------------------------- */

static shmq_property property(const char *name, const char *value)
{
	return (shmq_property){name, value, (uint32_t)strlen(name), (uint32_t)strlen(value)};
}

static uint64_t add(uint8_t *block, uint64_t length, const char *name, const char *value)
{
	shmq_property p = property(name, value);

	EQUAL(shmq_property_add(block, &length, &p), 0);
	return length;
}

static bool is(const shmq_property *p, const char *name, const char *value)
{
	return p->name_length == strlen(name) && !memcmp(p->name, name, p->name_length) &&
	       p->length == strlen(value) && !memcmp(p->value, value, p->length);
}

static void entries_come_back(void)
{
	uint8_t block[SHMQ_PROPERTIES_MOST];
	uint64_t length = 0, at = 0;
	shmq_property p;

	length = add(block, length, "key", "customer 17");
	length = add(block, length, "x", "");
	length = add(block, length, "content-type", "text/plain");
	EQUAL(length, 3 + 3 + 11 + 3 + 1 + 3 + 12 + 10);
	CHECK(!memcmp(block, "\3key\13\0customer", 14));
	EQUAL(shmq_properties_check(block, length), 0);
	EQUAL(shmq_property_next(block, length, &at, &p), 1);
	CHECK(is(&p, "key", "customer 17"));
	EQUAL(shmq_property_next(block, length, &at, &p), 1);
	CHECK(is(&p, "x", ""));
	EQUAL(shmq_property_next(block, length, &at, &p), 1);
	CHECK(is(&p, "content-type", "text/plain"));
	EQUAL(shmq_property_next(block, length, &at, &p), 0);
	EQUAL(at, length);
}

static void names_are_checked(void)
{
	static const char *const bad[] = {"", "Key", "a b", "\xc3\xa4", "shmq-expires", "shmq-", "a\n"};
	static const char *const good[] = {"a", "shmq", "0.9_-z", "traceparent"};
	char name[SHMQ_PROPERTY_NAME + 2];
	uint8_t block[SHMQ_PROPERTIES_MOST];
	uint64_t length = 0;
	shmq_property p;

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		p = property(bad[i], "value");
		EQUAL(shmq_property_add(block, &length, &p), SHMQ_INVALID);
		CHECK(*shmq_error_detail());
		EQUAL(length, 0);
	}
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
		length = add(block, length, good[i], "value");
	EQUAL(shmq_properties_check(block, length), 0);
	memset(name, 'n', sizeof(name));
	name[SHMQ_PROPERTY_NAME] = 0;
	length = add(block, length, name, "the longest");
	name[SHMQ_PROPERTY_NAME] = 'n';
	name[SHMQ_PROPERTY_NAME + 1] = 0;
	p = property(name, "too long");
	EQUAL(shmq_property_add(block, &length, &p), SHMQ_INVALID);
}

static void a_block_has_a_limit(void)
{
	static uint8_t value[UINT16_MAX];
	uint8_t block[SHMQ_PROPERTIES_MOST];
	uint64_t length = 0;
	shmq_property p = {"v", value, 1, SHMQ_PROPERTIES_MOST - 4};

	EQUAL(shmq_property_add(block, &length, &p), 0);
	EQUAL(length, SHMQ_PROPERTIES_MOST);
	EQUAL(shmq_properties_check(block, length), 0);
	p.length = 0;
	EQUAL(shmq_property_add(block, &length, &p), SHMQ_TOO_BIG);
	EQUAL(length, SHMQ_PROPERTIES_MOST);
	length = 0;
	p.length = SHMQ_PROPERTIES_MOST - 3;
	EQUAL(shmq_property_add(block, &length, &p), SHMQ_TOO_BIG);
	p.length = UINT32_MAX;
	EQUAL(shmq_property_add(block, &length, &p), SHMQ_TOO_BIG);
	EQUAL(length, 0);
	EQUAL(shmq_properties_check(block, SHMQ_PROPERTIES_MOST + 1), SHMQ_TOO_BIG);
}

static uint64_t random_next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

/* Reads a block that ends where its memory ends, so that the sanitizer sees a read behind it. */
static void read_all(const uint8_t *from, uint64_t length)
{
	uint8_t *block = malloc(length ? length : 1);
	uint64_t at = 0, before = 0;
	shmq_property p;
	uint8_t sum = 0;

	memcpy(block, from, length);
	while (shmq_property_next(block, length, &at, &p) > 0) {
		CHECK(at > before && at <= length);
		for (uint32_t i = 0; i < p.length; i++)
			sum ^= ((const uint8_t *)p.value)[i];
		for (uint32_t i = 0; i < p.name_length; i++)
			sum ^= (uint8_t)p.name[i];
		before = at;
	}
	CHECK(at <= length);
	(void)shmq_properties_check(block, length);
	free(block);
	(void)sum;
}

static void garbage_is_read_within_its_bounds(void)
{
	uint64_t state = 88172645463325252, length = 0;
	uint8_t block[SHMQ_PROPERTIES_MOST], copy[SHMQ_PROPERTIES_MOST];

	for (int i = 0; i < 20; i++)
		length = add(block, length, i % 2 ? "name" : "another.name", "a value");
	for (uint64_t n = 0; n <= length; n++)
		read_all(block, n);
	for (int i = 0; i < 20000; i++) {
		memcpy(copy, block, length);
		for (int k = 0; k < 3; k++)
			copy[random_next(&state) % length] = (uint8_t)random_next(&state);
		read_all(copy, length);
		for (uint64_t k = 0; k < 64; k++)
			copy[k] = (uint8_t)random_next(&state);
		read_all(copy, random_next(&state) % 64);
	}
}

/* ---- in a queue ----------------------------------------------------------------------------- */

static uint8_t block[SHMQ_PROPERTIES_MOST];
static uint64_t block_length;

static void take_one(shmq_consumer *c, shmq_message *m)
{
	uint32_t got;

	EQUAL(shmq_take(c, m, 1, soon(), &got), 0);
	EQUAL(got, 1);
}

static bool has(const shmq_message *m, const char *body, bool with)
{
	return m->length == strlen(body) && !memcmp(m->body, body, m->length) &&
	       m->properties == (with ? block_length : 0) &&
	       (!with || !memcmp((const uint8_t *)m->body - block_length, block, block_length));
}

typedef struct bench {
	world *w;
	shmq_broker *b;
	uint32_t topic, generation, queue;
	uint64_t serial;
	shmq_producer *p;
	shmq_consumer *c;
} bench;

static bench setup(void)
{
	bench x = {.w = world_start(small_limits(100, 100))};

	x.topic = world_topic(x.w, "t", &x.generation);
	x.queue = world_queue(x.w, x.topic, "c", &x.serial);
	x.b = world_attach(x.w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(x.b, x.topic, x.generation, &x.p), 0);
	x.c = world_consumer(x.w, x.b, x.queue, x.serial, 1000);
	return x;
}

static void teardown(bench x)
{
	SOUND(x.w);
	EQUAL(shmq_consumer_close(x.c, soon()), 0);
	shmq_consumer_free(x.c);
	shmq_producer_close(x.p);
	EQUAL(MAPPED(x.w, x.b, shmq_broker_detach(x.b, soon())), 0);
	shmq_broker_close(x.b);
	world_stop(x.w);
}

/* Publish a message with the block, or without. */
static void put(bench *x, const char *body, bool with, int64_t due)
{
	shmq_body bodies = {body, strlen(body)}, properties = {block, block_length};
	shmq_terms terms = {.due = due, .properties = with ? &properties : NULL};
	uint64_t id;

	EQUAL(MAPPED(x->w, x->b, shmq_publish_on(x->p, &bodies, 1, &terms, soon(), &id)), 0);
}

/* Take the next message, which is this one, and finish it. */
static void get(bench *x, const char *body, bool with)
{
	shmq_message m;

	take_one(x->c, &m);
	CHECK(has(&m, body, with));
	EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
}

static void small_and_large_bodies_carry_properties(void)
{
	bench x = setup();
	static char large[SHMQ_LARGE + 1];
	shmq_body bodies[2] = {{"one", 3}, {"two", 3}},
			  properties[2] = {{block, block_length}, {NULL, 0}};
	shmq_terms terms = {.properties = properties};
	shmq_loan *loan;
	shmq_message m;
	uint64_t id;

	memset(large, 'l', SHMQ_LARGE);
	for (int round = 0; round < 3; round++) { /* slots are used again */
		EQUAL(MAPPED(x.w, x.b, shmq_publish_on(x.p, bodies, 2, &terms, soon(), &id)), 0);
		put(&x, large, true, 0);
		EQUAL(shmq_loan_begin_on(x.p, 10, properties, soon(), &loan), 0);
		memcpy(shmq_loan_data(loan), "lent......", 10);
		shmq_loan_truncate(loan, 4);
		EQUAL(shmq_loan_commit(loan, 0, soon(), &id), 0);
		shmq_loan_free(loan);
		put(&x, "plain", false, 0);
		get(&x, "one", true);
		take_one(x.c, &m);
		CHECK(has(&m, "two", false));
		EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, soon()), 0);
		get(&x, large, true);
		take_one(x.c, &m);
		CHECK(has(&m, "lent", true));
		EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, soon()), 0);
		EQUAL(shmq_rebuild(x.w->supervisor, x.queue, soon()), 0);
		get(&x, "plain", false);
		get(&x, "two", false);
		get(&x, "lent", true);
	}
	EQUAL(ld(&x.p->t->bytes), 3 * (3 + 3 + SHMQ_LARGE + 4 + 5));
	teardown(x);
}

static void bad_properties_are_refused(void)
{
	bench x = setup();
	uint64_t id, most = x.b->d->limits.max_msg_size;
	static uint8_t value[SHMQ_PROPERTIES_MOST + 1];
	uint8_t *large = calloc(1, most);
	shmq_body body = {"b", 1}, properties;
	shmq_terms terms = {.properties = &properties};
	shmq_loan *loan;

	static const struct {
		const void *data;
		uint64_t length;
		int status;
	} bad[] = {{"\1K\0\0", 4, SHMQ_INVALID},
	           {"\5shmq-\0\0", 8, SHMQ_INVALID},
	           {"\1k\0", 3, SHMQ_INVALID},
	           {"\1k\1\0", 4, SHMQ_INVALID},
	           {value, sizeof(value), SHMQ_TOO_BIG}};

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		properties = (shmq_body){bad[i].data, bad[i].length};
		EQUAL(shmq_publish_on(x.p, &body, 1, &terms, soon(), &id), bad[i].status);
		CHECK(*shmq_error_detail());
		EQUAL(shmq_loan_begin_on(x.p, 1, &properties, soon(), &loan), bad[i].status);
	}
	properties = (shmq_body){"\1k\0\0", 4};
	body = (shmq_body){large, most - SHMQ_ENVELOPE - 4};
	EQUAL(MAPPED(x.w, x.b, shmq_publish_on(x.p, &body, 1, &terms, soon(), &id)), 0);
	body.length++;
	EQUAL(shmq_publish_on(x.p, &body, 1, &terms, soon(), &id), SHMQ_TOO_BIG);
	EQUAL(shmq_loan_begin_on(x.p, body.length, &properties, soon(), &loan), SHMQ_TOO_BIG);
	free(large);
	teardown(x);
}

static void a_garbled_slot_does_no_harm(void)
{
	static const uint32_t sizes[] = {0, 8, SHMQ_PROPERTIES_MOST + 1, UINT32_MAX};
	bench x = setup();
	shmq_body body = {"1234", 4}, properties = {"\1k\0\0", 4};
	shmq_terms terms = {.properties = &properties};
	shmq_map *map = world_view(x.w, x.queue);
	shmq_message m;
	uint64_t id;

	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		EQUAL(MAPPED(x.w, x.b, shmq_publish_on(x.p, &body, 1, &terms, soon(), &id)), 0);
		map->slots[map->ready[ld(&map->q->ready_head) & ring_mask_of(map)]].properties = sizes[i];
		take_one(x.c, &m);
		EQUAL(m.properties, sizes[i] == 8 ? 8 : 0);
		EQUAL(m.length, 0); /* what cannot be right is taken for no body */
		EQUAL(shmq_finish(x.c, &m, 1, NULL, soon()), 0);
	}
	teardown(x);
}

/* ---- on disk -------------------------------------------------------------------------------- */

/* Spill everything from `source` to a file in memory, and restore it. */
static void to_disk_and_back(bench *x, enum shmq_spill_source source)
{
	static uint8_t file[100000];
	uint32_t slots[20], lengths[20], taken;
	uint64_t positions[20], at, begin = SHMQ_POS(1, 0), used;
	shmq_spill batch = {.slots = slots, .lengths = lengths, .positions = positions};
	shmq_broker *b = x->w->supervisor;

	EQUAL(shmq_disk_adopt(b, x->queue, begin, begin, 0, 0, soon()), 0);
	EQUAL(shmq_spill_begin(b, x->queue, source, 20, sizeof(file), soon(), &batch), 0);
	at = begin;
	for (uint32_t i = 0; i < batch.count; i++) {
		positions[i] = at;
		at += lengths[i];
	}
	EQUAL(at - begin, batch.bytes);
	EQUAL(shmq_spill_encode(b, &batch, file), 0);
	EQUAL(shmq_spill_end(b, &batch, at, true, soon()), 0);
	EQUAL(shmq_restore(
				  b, x->queue,
				  &(shmq_records){
					  .data = file, .length = at - begin, .position = begin, .next_position = at},
				  soon(), &taken, &used),
	      0);
	EQUAL(taken, batch.count);
	EQUAL(used, batch.bytes);
}

static void properties_survive_the_disk(void)
{
	bench x = setup();
	char odd[60] = {0};
	uint32_t count;
	uint64_t read;
	shmq_map *map = world_view(x.w, x.queue);

	memset(odd, 'o', sizeof(odd) - 1);
	memcpy(odd, magic, sizeof(magic));
	put(&x, "first", true, 0);
	put(&x, "second", false, 0);
	put(&x, odd, false, 0);
	put(&x, odd, true, 0);
	to_disk_and_back(&x, SHMQ_SPILL_READY);
	/* what was read ahead is recognised by the length of its record */
	EQUAL(shmq_evict_read_ahead(x.w->supervisor, x.queue, soon(), &count), 0);
	EQUAL(count, 4);
	read = ld(&map->q->disk_read);
	EQUAL(read, SHMQ_POS(1, 0));
	EQUAL(shmq_disk_adopt(x.w->supervisor, x.queue, read, read, 0, 0, soon()), 0);
	put(&x, "first", true, 0);
	put(&x, "second", false, 0);
	put(&x, odd, false, 0);
	put(&x, odd, true, 0);
	to_disk_and_back(&x, SHMQ_SPILL_ALL);
	get(&x, "first", true);
	get(&x, "second", false);
	get(&x, odd, false);
	get(&x, odd, true);
	teardown(x);
}

static void rare_fields_survive_the_disk(void)
{
	bench x = setup();
	shmq_map *map = world_view(x.w, x.queue);
	shmq_slot_desc *s;
	shmq_message m;

	put(&x, "marked", true, 0);
	s = &map->slots[map->ready[ld(&map->q->ready_head) & ring_mask_of(map)]];
	s->flags |= SHMQ_SLOT_EXPIRES | SHMQ_SLOT_FAILED | SHMQ_SLOT_SUSPECT;
	s->expires = 4000000000 * NS_PER_S;
	st(&s->failures, 3u << 16 | 77);
	to_disk_and_back(&x, SHMQ_SPILL_READY);
	take_one(x.c, &m);
	CHECK(has(&m, "marked", true));
	s = &map->slots[m.slot];
	EQUAL(s->flags,
	      SHMQ_SLOT_EXPIRES | SHMQ_SLOT_FAILED | SHMQ_SLOT_SUSPECT | SHMQ_SLOT_PROPERTIES);
	EQUAL(s->expires, 4000000000 * NS_PER_S);
	EQUAL(ld(&s->failures) >> 16, 3);
	/* this delivery is not taken for the one that was counted */
	CHECK((uint16_t)ld(&s->failures) != (uint16_t)SHMQ_GENERATION_OF(ld(&s->word)));
	EQUAL(shmq_finish(x.c, &m, 1, NULL, soon()), 0);
	put(&x, "plain", false, 0); /* the slot's next message has none of it */
	get(&x, "plain", false);
	teardown(x);
}

static void properties_survive_a_chunk(void)
{
	bench x = setup();
	static uint8_t records[10000];
	uint32_t slots[20], lengths[20], taken, expired, due;
	uint64_t positions[20];
	int64_t dues[2], at = realtime_ns() + 100 * NS_PER_S;
	shmq_spill batch = {.slots = slots, .lengths = lengths, .positions = positions};
	shmq_broker *b = x.w->supervisor;

	put(&x, "late", true, at);
	put(&x, "later", false, at + 1);
	EQUAL(shmq_chunk_begin(b, x.queue,
	                       &(shmq_chunk_wish){.chunk = 1, .n = 20, .max_bytes = sizeof(records)},
	                       soon(), &batch),
	      0);
	EQUAL(batch.count, 2);
	EQUAL(shmq_spill_encode(b, &batch, records), 0);
	EQUAL(shmq_spill_end(b, &batch, 0, true, soon()), 0);
	dues[0] = (int64_t)positions[0];
	dues[1] = (int64_t)positions[1];
	EQUAL(shmq_chunk_load(b, x.queue,
	                      &(shmq_chunk_records){.data = records,
	                                            .length = batch.bytes,
	                                            .dues = dues,
	                                            .n = 2,
	                                            .position = 1 << 24},
	                      soon(), &taken),
	      0);
	EQUAL(taken, 2);
	EQUAL(shmq_expire(b, x.queue, &(shmq_expiry){.now = now_ns(), .realtime = at + 2, .limit = 100},
	                  soon(), &expired, &due),
	      0);
	EQUAL(due, 2);
	get(&x, "late", true);
	get(&x, "later", false);
	teardown(x);
}

/* ---- other readers and copies --------------------------------------------------------------- */

static void a_backlog_keeps_them_on_the_way_to_the_channels(void)
{
	world *w = world_start(small_limits(100, 100));
	bench x = {.w = w};
	uint32_t moved;
	uint64_t serial;

	x.topic = world_topic(w, "t", &x.generation);
	(void)world_queue(w, x.topic, NULL, &serial);
	x.b = world_attach(w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(x.b, x.topic, x.generation, &x.p), 0);
	put(&x, "early", true, 0);
	put(&x, "plain", false, 0);
	x.queue = world_queue(w, x.topic, "c", &x.serial);
	(void)world_queue(w, x.topic, "d", &serial);
	x.c = world_consumer(w, x.b, x.queue, x.serial, 1000);
	EQUAL(MAPPED(w, w->supervisor,
	             shmq_pump(w->supervisor, x.topic, x.generation, 10, soon(), &moved)),
	      0);
	EQUAL(moved, 2);
	get(&x, "early", true);
	get(&x, "plain", false);
	teardown(x);
}

static void a_lease_and_a_frame_have_the_body_alone(void)
{
	bench x = setup();
	shmq_lease_holder holder;
	shmq_lease lease;
	shmq_lease_cursor cursor;
	uint32_t count;
	uint64_t size, ids[2], messages;
	int64_t timestamps[2];
	int32_t attempts[2], offsets[3];
	uint8_t data[20], frame[SHMQ_WIRE_FRAME + 20];
	shmq_message m;

	put(&x, "rented", true, 0);
	put(&x, "plain", false, 0);
	EQUAL(shmq_lease_holder_open(x.b, x.queue, x.serial, &(shmq_lease_settings){.name = "h"},
	                             soon(), &holder),
	      0);
	EQUAL(shmq_lease_take(x.b, &holder, &(shmq_lease_wish){.n = 2, .max_bytes = 11, .parts = 1},
	                      soon(), &lease),
	      0);
	EQUAL(lease.count, 2);
	EQUAL(lease.bytes, 11);
	EQUAL(shmq_lease_open(x.b, x.queue, x.serial, lease.id, 0, &cursor), 0);
	EQUAL(shmq_lease_measure(x.b, &cursor, 2, 20, &count, &size), 0);
	EQUAL(size, 11);
	EQUAL(shmq_lease_copy(x.b, &cursor, 2, size,
	                      &(shmq_columns){ids, timestamps, attempts, offsets, data}),
	      0);
	CHECK(!memcmp(data, "rentedplain", 11));
	EQUAL(offsets[1], 6);
	EQUAL(shmq_lease_return(x.b, &holder, lease.id, soon(), &messages), 0);
	take_one(x.c, &m);
	CHECK(has(&m, "rented", true));
	EQUAL(shmq_wire_frame(&m, frame), SHMQ_WIRE_FRAME + 6);
	CHECK(!memcmp(frame + SHMQ_WIRE_FRAME, "rented", 6));
	EQUAL(shmq_finish(x.c, &m, 1, NULL, soon()), 0);
	get(&x, "plain", false);
	teardown(x);
}

int main(void)
{
	entries_come_back();
	names_are_checked();
	a_block_has_a_limit();
	garbage_is_read_within_its_bounds();
	block_length = add(block, 0, "key", "17");
	block_length = add(block, block_length, "reply-to", "answers");
	small_and_large_bodies_carry_properties();
	bad_properties_are_refused();
	a_garbled_slot_does_no_harm();
	properties_survive_the_disk();
	rare_fields_survive_the_disk();
	properties_survive_a_chunk();
	a_backlog_keeps_them_on_the_way_to_the_channels();
	a_lease_and_a_frame_have_the_body_alone();
	return 0;
}
