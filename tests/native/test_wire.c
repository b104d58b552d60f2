/* nsqd's TCP protocol where many commands come at a time: golden bytes, cuts, deliveries by id. */
#include "harness.h"

static void bodies_are_found_and_bad_sizes_are_told(void)
{
	static const uint8_t data[] = {0, 0, 0, 1, 'a', 0, 0, 0, 2, 'b', 'c', 0xff, 0xff, 0xff, 0xfe};
	shmq_wire_input in = {.data = data, .length = sizeof(data), .max_msg_size = 100};
	shmq_body bodies[3];
	uint32_t whole;
	uint64_t used;
	int64_t bad;

	EQUAL(shmq_wire_bodies(&in, 3, bodies, &whole, &used, &bad), SHMQ_INVALID);
	EQUAL(whole, 2);
	EQUAL(used, 11);
	EQUAL(bad, -2);
	EQUAL(bodies[1].length, 2);
	CHECK(!memcmp(bodies[1].data, "bc", 2));
	in.length = 11;
	in.max_msg_size = 1;
	EQUAL(shmq_wire_bodies(&in, 2, NULL, &whole, &used, &bad), SHMQ_INVALID);
	EQUAL(whole, 1);
	EQUAL(bad, 2);
	in.max_msg_size = 100;
	for (in.length = 0; in.length < 11; in.length++) {
		EQUAL(shmq_wire_bodies(&in, 2, NULL, &whole, &used, &bad), 0);
		EQUAL(whole, in.length >= 5);
		EQUAL(used, in.length >= 5 ? 5 : 0);
	}
	in.length = sizeof(data);
	EQUAL(shmq_wire_bodies(&in, 2, NULL, &whole, &used, &bad), 0);
	EQUAL(whole, 2);
	EQUAL(shmq_wire_bodies(&(shmq_wire_input){.data = "\0\0\0\0", .length = 4, .max_msg_size = 100},
	                       1, NULL, &whole, &used, &bad),
	      SHMQ_INVALID);
	EQUAL(bad, 0);
}

static void publishes_of_one_topic_are_a_run(void)
{
	static const char data[] = "PUB t\n\0\0\0\1aPUB t\n\0\0\0\2bcPUB u\n\0\0\0\1d";
	static const char big[] = "PUB t\n\0\0\0\3abc";
	const uint64_t size = sizeof(data) - 1;
	shmq_wire_input in = {
		.data = data, .length = size, .line = "PUB t\n", .line_length = 6, .max_msg_size = 100};
	shmq_body bodies[3];
	uint64_t used;

	EQUAL(shmq_wire_publishes(&in, 3, bodies, &used), 2);
	EQUAL(used, 23);
	EQUAL(bodies[1].length, 2);
	CHECK(!memcmp(bodies[1].data, "bc", 2));
	EQUAL(shmq_wire_publishes(&in, 1, bodies, &used), 1);
	EQUAL(used, 11);
	for (in.length = 0; in.length < 23; in.length++) {
		EQUAL(shmq_wire_publishes(&in, 3, bodies, &used), in.length >= 11);
		EQUAL(used, in.length >= 11 ? 11 : 0);
	}
	in.length = size;
	in.line = "PUB u\n";
	EQUAL(shmq_wire_publishes(&in, 3, bodies, &used), 0);
	in.line = "PUB t\n";
	in.data = big;
	in.length = sizeof(big) - 1;
	in.max_msg_size = 2;
	EQUAL(shmq_wire_publishes(&in, 3, bodies, &used), 0);
	EQUAL(used, 0);
}

static void a_batch_is_read_when_it_is_whole(void)
{
	static const char data[] = "MPUB t\n\0\0\0\17\0\0\0\2\0\0\0\1a\0\0\0\2bcMPUB t\n";
	static const struct {
		uint64_t at;
		char value;
	} wrong[] = {{5, 'u'}, {10, 0},  {10, 101}, {7, -1},  {14, 0},
	             {14, 20}, {11, -1}, {18, 0},   {18, 101}};
	shmq_wire_input in = {.data = data,
	                      .line = "MPUB t\n",
	                      .line_length = 7,
	                      .max_msg_size = 100,
	                      .max_body_size = 100};
	shmq_body bodies[3];
	char copy[sizeof(data)];
	uint64_t used;

	for (in.length = 0; in.length < sizeof(data); in.length++) {
		EQUAL(shmq_wire_batch(&in, 3, bodies, &used), in.length >= 26 ? 2 : 0);
		EQUAL(used, in.length >= 26 ? 26 : 0);
	}
	in.length = 26;
	EQUAL(bodies[1].length, 2);
	CHECK(!memcmp(bodies[1].data, "bc", 2));
	EQUAL(shmq_wire_batch(&in, 1, bodies, &used), 0);
	in.data = copy;
	for (unsigned i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		memcpy(copy, data, sizeof(data));
		copy[wrong[i].at] = wrong[i].value;
		EQUAL(shmq_wire_batch(&in, 3, bodies, &used), 0);
		EQUAL(used, 0);
	}
}

static void fin_runs_end_where_something_else_begins(void)
{
	static const char lines[] =
			"FIN 18a1f262a9a69001\nFIN 0000000000000000\nFIN 18A1F262A9A69001\n";
	uint64_t ids[3], used;

	EQUAL(shmq_wire_finishes(lines, sizeof(lines) - 1, ids, 3, &used), 2);
	EQUAL(used, 42);
	EQUAL(ids[0], 0x18a1f262a9a69001);
	EQUAL(ids[1], 0);
	EQUAL(shmq_wire_finishes(lines, 41, ids, 3, &used), 1);
	EQUAL(shmq_wire_finishes(lines, 42, ids, 1, &used), 1);
	EQUAL(used, 21);
	EQUAL(shmq_wire_finishes("FIN 18a1f262a9a69001\r", 21, ids, 1, &used), 0);
	EQUAL(used, 0);
}

static void a_frame_is_nsqds(void)
{
	static const uint8_t golden[] = {0x00, 0x00, 0x00, 0x23, 0x00, 0x00, 0x00, 0x02, 0x18, 0xe9,
	                                 0xc5, 0x67, 0xf2, 0xe9, 0x27, 0x62, 0x00, 0x01, '1',  '8',
	                                 'a',  '1',  'f',  '2',  '5',  'f',  '3',  '7',  'a',  '6',
	                                 '9',  '0',  '0',  '0',  'h',  'e',  'l',  'l',  'o'};
	shmq_message m = {.id = 0x18a1f25f37a69000,
	                  .timestamp = 0x18e9c567f2e92762,
	                  .attempts = 1,
	                  .body = "hello",
	                  .length = 5};
	uint8_t out[64];

	EQUAL(shmq_wire_frame(&m, out), sizeof(golden));
	CHECK(!memcmp(out, golden, sizeof(golden)));
}

/* Taken, found and removed in any order; entries of messages settled elsewhere are swept. */
static void deliveries_are_found_by_id(void)
{
	enum { ROUNDS = 400, EACH = 50, MOST = ROUNDS * EACH };
	static shmq_message live[MOST];
	world *w = world_start(small_limits(4096, 16384));
	uint32_t generation, topic = world_topic(w, "t", &generation), n = 0, got;
	uint64_t serial, random = 88172645463325252u;
	uint32_t queue = world_queue(w, topic, "c", &serial);
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	shmq_consumer *c = world_consumer(w, b, queue, serial, MOST);
	shmq_producer *p;
	shmq_window *window;

	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	EQUAL(shmq_window_open(&window), 0);
	for (int round = 0; round < ROUNDS; round++) {
		for (int i = 0; i < EACH; i++)
			EQUAL(world_publish(w, b, p, "x"), 0);
		EQUAL(shmq_take_bytes(c, live + n, EACH, EACH / 2, soon(), &got), 0);
		EQUAL(got, EACH / 2); /* one byte each */
		EQUAL(shmq_take(c, live + n + got, EACH / 2, soon(), &got), 0);
		EQUAL(shmq_window_reserve(window, c, EACH), 0);
		for (int i = 0; i < EACH; i++)
			shmq_window_add(window, &live[n++]);
		for (int i = 0; i < EACH - 1; i++) {
			shmq_message m, found;
			uint32_t at;

			random ^= random << 13;
			random ^= random >> 7;
			random ^= random << 17;
			at = (uint32_t)(random % n);
			m = live[at];
			CHECK(shmq_window_find(window, m.id, &found));
			EQUAL(found.word, m.word);
			EQUAL(found.slot, m.slot);
			if (random >> 40 & 1) {
				CHECK(shmq_window_remove(window, m.id, &found));
				CHECK(!shmq_window_remove(window, m.id, &found));
				CHECK(!shmq_window_find(window, m.id, &found));
			}
			EQUAL(shmq_finish(c, &m, 1, NULL, soon()), 0);
			live[at] = live[--n];
		}
	}
	for (uint32_t i = 0; i < n; i++)
		CHECK(shmq_window_remove(window, live[i].id, &live[i]));
	shmq_window_free(window);
	world_leave(w, b, p, c);
	world_stop(w);
}

static void a_consumer_takes_up_to_its_limit(void)
{
	world *w = world_start(small_limits(1000, 1000));
	uint32_t generation, topic = world_topic(w, "t", &generation), got;
	uint64_t serial;
	uint32_t queue = world_queue(w, topic, "c", &serial);
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	shmq_consumer *c = world_consumer(w, b, queue, serial, 0);
	shmq_producer *p;
	shmq_message m[9];

	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	for (int i = 0; i < 9; i++)
		EQUAL(world_publish(w, b, p, "x"), 0);
	EQUAL(shmq_take(c, m, 9, soon(), &got), SHMQ_EMPTY);
	shmq_consumer_limit(c, 4);
	EQUAL(shmq_take(c, m, 9, soon(), &got), 0);
	EQUAL(got, 4);
	shmq_consumer_limit(c, 1);
	EQUAL(shmq_finish(c, m, 3, NULL, soon()), 0);
	EQUAL(shmq_take(c, m, 9, soon(), &got), SHMQ_EMPTY);
	shmq_consumer_limit(c, 3);
	EQUAL(shmq_take(c, m, 9, soon(), &got), 0);
	EQUAL(got, 2);
	SOUND(w);
	world_leave(w, b, p, c);
	world_stop(w);
}

int main(void)
{
	bodies_are_found_and_bad_sizes_are_told();
	publishes_of_one_topic_are_a_run();
	a_batch_is_read_when_it_is_whole();
	fin_runs_end_where_something_else_begins();
	a_frame_is_nsqds();
	deliveries_are_found_by_id();
	a_consumer_takes_up_to_its_limit();
	return 0;
}
