/*
 * Segments as they are opened: any bytes over the header of a directory or a queue. Input: which
 * (1), from where (2, in bytes), then the bytes. Nobody but the opener looks; it says so or is
 * right.
 */
#include "../native/scene.h"

static scene *s;
#define PLACES offsetof(shmq_queue_desc, slots_at)
#define PLACES_END offsetof(shmq_queue_desc, low_water)

static uint8_t directory[sizeof(shmq_directory_desc)], queue[sizeof(shmq_queue_desc)];

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc;
	(void)argv;
	scene_unmaps_every = 64;
	s = scene_make();
	memcpy(directory, s->b->d, sizeof(directory));
	memcpy(queue, s->map[0]->q, sizeof(queue));
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	bool is_queue;
	uint8_t *to;
	size_t room, at;
	int r;

	if (size < 3)
		return 0;
	is_queue = data[0] & 1;
	to = is_queue ? (uint8_t *)s->map[0]->q : (uint8_t *)s->b->d;
	room = is_queue ? sizeof(queue) : sizeof(directory);
	at = (size_t)(data[1] | data[2] << 8) % room;
	memcpy(to + at, data + 3, size - 3 < room - at ? size - 3 : room - at);
	if (is_queue) {
		r = shmq_broker_map(s->b, s->queue[0], s->serial[0], s->w->queues[s->serial[0]]);
		/* An opened segment has the offsets with which it was created. */
		CHECK(r || !memcmp(to + PLACES, queue + PLACES, PLACES_END - PLACES));
		memcpy(to, queue, room);
	} else {
		shmq_broker *b;

		r = shmq_broker_open(s->w->directory, &b);
		memcpy(to, directory, room);
		if (!r)
			shmq_broker_close(b);
	}
	CHECK(r == 0 || r == SHMQ_LAYOUT || r == SHMQ_NOT_READY || r == SHMQ_CORRUPT || r == SHMQ_GONE);
	return 0;
}
