/* Opening what is not, or not any more, a segment of ours: a status, never a crash. */
#include "harness.h"

static int directory(void)
{
	shmq_limits limits = small_limits(300, 300);
	int fd = memfd_create("directory", MFD_CLOEXEC);

	EQUAL(shmq_directory_create(fd, &limits, NULL), 0);
	return fd;
}

static int open_directory(int fd)
{
	shmq_broker *b;
	int r = shmq_broker_open(fd, &b);

	if (!r)
		shmq_broker_close(b);
	return r;
}

#define FIELD(type, name) offsetof(type, name), sizeof(((type *)0)->name)

static uint64_t poke(int fd, uint64_t at, size_t size, uint64_t value)
{
	uint64_t old = 0;

	EQUAL(pread(fd, &old, size, (off_t)at), size);
	EQUAL(pwrite(fd, &value, size, (off_t)at), size);
	return old;
}

static void each_field_of_the_prologue_is_checked(void)
{
	static const struct {
		size_t at, size;
		uint64_t value;
		int status;
	} changes[] = {
		{FIELD(shmq_segment_desc, magic), 0, SHMQ_LAYOUT},
		{FIELD(shmq_segment_desc, magic), 0x1a73686d71310d0a,
		 SHMQ_LAYOUT}, /* the other byte order */
		{FIELD(shmq_segment_desc, layout_version), SHMQ_LAYOUT_VERSION + 1, SHMQ_LAYOUT},
		{FIELD(shmq_segment_desc, kind), SHMQ_SEGMENT_QUEUE, SHMQ_LAYOUT},
		{FIELD(shmq_segment_desc, fingerprint), 12345, SHMQ_LAYOUT},
		{offsetof(shmq_segment_desc, boot_id), 8, 1, SHMQ_LAYOUT},
		{FIELD(shmq_segment_desc, size), 4096, SHMQ_LAYOUT},
		{FIELD(shmq_segment_desc, ready), SHMQ_RAW_STATE, SHMQ_NOT_READY},
		{FIELD(shmq_segment_desc, ready), SHMQ_CLOSED_STATE, SHMQ_GONE},
		{FIELD(shmq_segment_desc, ready), 77, SHMQ_LAYOUT},
	};
	int fd = directory();

	EQUAL(open_directory(fd), 0);
	for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
		uint64_t old = poke(fd, changes[i].at, changes[i].size, changes[i].value);

		EQUAL(open_directory(fd), changes[i].status);
		CHECK(changes[i].status == SHMQ_GONE || *shmq_error_detail()); /* and says why */
		(void)poke(fd, changes[i].at, changes[i].size, old);
		EQUAL(open_directory(fd), 0);
	}
	close(fd);
}

static void a_truncated_or_foreign_file_is_refused(void)
{
	static const struct {
		off_t size;
		int status;
	} sizes[] = {
		{0, SHMQ_NOT_READY}, {1, SHMQ_LAYOUT},    {127, SHMQ_LAYOUT},    {128, SHMQ_LAYOUT},
		{4095, SHMQ_LAYOUT}, {4096, SHMQ_LAYOUT}, {100000, SHMQ_LAYOUT},
	};
	int fd, pipes[2];

	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		fd = directory();
		EQUAL(ftruncate(fd, sizes[i].size), 0);
		EQUAL(open_directory(fd), sizes[i].status);
		close(fd);
	}
	fd = directory();
	EQUAL(ftruncate(fd, (off_t)shmq_directory_bytes() + 4096), 0); /* longer is as wrong */
	EQUAL(open_directory(fd), SHMQ_LAYOUT);
	close(fd);
	EQUAL(open_directory(-1), SHMQ_LAYOUT);
	EQUAL(pipe(pipes), 0);
	EQUAL(open_directory(pipes[0]), SHMQ_LAYOUT);
	close(pipes[0]);
	close(pipes[1]);
}

static void another_queue_is_not_taken_for_ours(void)
{
	world *w = world_start(small_limits(300, 300)), *other = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, foreign;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	uint64_t serial, foreign_serial;

	queue = world_queue(w, topic, "c", &serial);
	world_topic(other, "t", &generation);
	foreign = world_queue(other, topic, "c", &foreign_serial);
	EQUAL(shmq_broker_map(b, foreign, foreign_serial, other->queues[foreign_serial]), SHMQ_CORRUPT);
	EQUAL(shmq_broker_map(b, queue, serial + 1, w->queues[serial]), SHMQ_CORRUPT);
	EQUAL(shmq_broker_map(b, queue + 1, serial, w->queues[serial]), SHMQ_CORRUPT);
	EQUAL(shmq_broker_map(b, UINT32_MAX, serial, w->queues[serial]), SHMQ_INVALID);
	EQUAL(shmq_broker_map(b, queue, serial, w->directory), SHMQ_LAYOUT);
	EQUAL(shmq_broker_map(b, queue, serial, w->queues[serial]), 0);
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	world_stop(w);
	world_stop(other);
}

/* Every word of both headers is overwritten, one after the other, with several kinds of garbage: a
 * segment that still opens can be looked at and closed. (Garbage in counters and names opens.) */
static const uint64_t garbage[] = {0,          1,          UINT32_MAX, 0x80000000,
                                   0x5a5a5a5a, 0x7fffffff, 0x00010000};

static void any_word_of_the_directorys_header_may_be_garbage(void)
{
	int fd = directory();
	uint32_t refused = 0;

	for (uint64_t at = 0; at < 512; at += 4)
		for (size_t g = 0; g < sizeof(garbage) / sizeof(garbage[0]); g++) {
			uint64_t old = poke(fd, at, 4, garbage[g]);
			int r = open_directory(fd);

			CHECK(r == 0 || r == SHMQ_LAYOUT || r == SHMQ_NOT_READY || r == SHMQ_CORRUPT ||
			      r == SHMQ_GONE);
			refused += r != 0;
			(void)poke(fd, at, 4, old);
		}
	CHECK(refused > 100);
	EQUAL(open_directory(fd), 0);
	close(fd);
}

static void any_word_of_a_queues_header_may_be_garbage(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, refused = 0;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	uint64_t serial;

	queue = world_queue(w, topic, "c", &serial);
	for (uint64_t at = 0; at < sizeof(shmq_queue_desc); at += 4)
		for (size_t g = 0; g < sizeof(garbage) / sizeof(garbage[0]); g++) {
			uint64_t old = poke(w->queues[serial], at, 4, garbage[g]);
			int r = shmq_broker_map(b, queue, serial, w->queues[serial]);
			CHECK(r == 0 || r == SHMQ_LAYOUT || r == SHMQ_NOT_READY || r == SHMQ_CORRUPT ||
			      r == SHMQ_GONE);
			refused += r != 0;
			(void)poke(w->queues[serial], at, 4, old);
		}
	CHECK(refused > 100);
	EQUAL(shmq_broker_map(b, queue, serial, w->queues[serial]), 0);
	SOUND(w);
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	world_stop(w);
}

/* Garbage in the slots of a queue whose holder died: a rebuild makes something sound of anything,
 * and touches nothing outside. */
static void a_rebuild_survives_garbage_in_the_slots(void)
{
	uint32_t seed = 3;

	for (int round = 0; round < 200; round++) {
		world *w = world_start(small_limits(300, 300));
		uint32_t generation, topic = world_topic(w, "t", &generation), queue, got;
		shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
		shmq_producer *p;
		shmq_consumer *c;
		shmq_message m;
		uint64_t serial;
		shmq_map *map;
		uint8_t *bytes;

		queue = world_queue(w, topic, "c", &serial);
		EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
		for (int i = 0; i < 40; i++)
			EQUAL(world_publish(w, b, p, "some body or other"), 0);
		map = world_view(w, queue);
		bytes = (uint8_t *)map->slots;
		for (int i = 0; i < 30; i++) {
			seed = seed * 1664525u + 1013904223u;
			bytes[(seed >> 8) % (128 * sizeof(shmq_slot_desc))] ^= (uint8_t)(1 + seed % 255);
		}
		st(&map->q->dirty, 1);
		c = world_consumer(w, b, queue, serial, 100);
		while (!shmq_take(c, &m, 1, soon(), &got)) {
			uint64_t sum = 0;

			for (uint32_t i = 0; i < m.length; i++)
				sum += ((const uint8_t *)m.body)[i];
			EQUAL(sum == UINT64_MAX, 0);
			EQUAL(shmq_finish(c, &m, 1, NULL, soon()), 0);
		}
		EQUAL(world_publish(w, b, p, "y"), 0);
		world_leave(w, b, p, c);
		world_stop(w);
	}
}

int main(void)
{
	each_field_of_the_prologue_is_checked();
	a_truncated_or_foreign_file_is_refused();
	another_queue_is_not_taken_for_ours();
	any_word_of_the_directorys_header_may_be_garbage();
	any_word_of_a_queues_header_may_be_garbage();
	a_rebuild_survives_garbage_in_the_slots();
	return 0;
}
