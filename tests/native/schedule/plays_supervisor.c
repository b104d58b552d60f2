/* Plays: topics and channels, adoption, rebuilds, the reaper, attach and detach. */
#include "stage.h"

static void pump_3(void)
{
	pump(k->actors[3].b);
}

static void enter_channel_3(void)
{
	k->late[1] = true;
	EQUAL(MAPPED(k->w, k->actors[3].b,
	             shmq_queue_enter(k->actors[3].b, k->queue[1], k->serial[1], k->topic, "b",
	                              soon())),
	      0);
}

static void take_over_3(void)
{
	uint32_t queue;
	uint64_t serial;

	EQUAL(MAPPED(k->w, k->actors[3].b,
	             shmq_queue_take_over(k->actors[3].b, k->topic, "a", NULL, soon(), &queue,
	                                  &serial)),
	      0);
	EQUAL(shmq_queue_renamed(k->actors[3].b, queue, "t:a", soon()), 0);
}

static void remove_channel_3(void)
{
	k->dropped[0] = true;
	EQUAL(MAPPED(k->w, k->actors[3].b,
	             shmq_queue_remove(k->actors[3].b, k->queue[0], k->serial[0], false, soon())),
	      0);
}

void adopt_3(void)
{
	EQUAL(shmq_adopt(k->actors[3].b, k->queue[0], soon()), 0);
}

void rebuild_2(void)
{
	EQUAL(shmq_rebuild(k->actors[2].b, k->queue[0], soon()), 0);
}

void rebuild_3(void)
{
	EQUAL(shmq_rebuild(k->actors[3].b, k->queue[0], soon()), 0);
}

static void give_back_3(void)
{
	uint64_t bytes;

	EQUAL(shmq_trim(k->actors[3].b, k->queue[0], soon(), &bytes), 0);
	CHECK(bytes);
}

void reap_3(void)
{
	uint32_t returned;

	(void)world_reap(k->w, k->actors[3].b, &returned);
}

static void pause_2(void)
{
	EQUAL(MAPPED(k->w, k->actors[2].b,
	             shmq_channel_pause(k->actors[2].b, k->queue[0], k->serial[0], true, soon())),
	      0);
	EQUAL(MAPPED(k->w, k->actors[2].b,
	             shmq_channel_pause(k->actors[2].b, k->queue[0], k->serial[0], false, soon())),
	      0);
}

static void attach_0(void)
{
	EQUAL(shmq_broker_attach(k->actors[0].b, SHMQ_AS_CLIENT, soon()), 0);
}

static void attach_1(void)
{
	EQUAL(shmq_broker_attach(k->actors[1].b, SHMQ_AS_CLIENT, soon()), 0);
}

static void detach_1(void)
{
	EQUAL(MAPPED(k->w, k->actors[1].b, shmq_broker_detach(k->actors[1].b, soon())), 0);
}

/* And there was room for far more. */
static void begin_taken_of_many(void)
{
	shmq_map *map;
	uint64_t had;

	begin_taken();
	schedule_as(3);
	EQUAL(MAPPED(k->w, k->actors[3].b,
	             map_get_serial(k->actors[3].b, k->queue[0], k->serial[0], &map)),
	      0);
	had = ld(&map->q->arena_committed);
	EQUAL(queue_grow_arena(map, had, 4 * had), 0);
	CHECK(arena_extend(&map->q->arena, map->arena, had, 4 * had));
	st(&map->q->arena_committed, 4 * had);
	map_release(map);
	schedule_as(OUTSIDE);
}

void begin_one_died(void)
{
	begin_with_supervisor();
	come_to_take(2, 0);
	schedule_as(2);
	take(2, 0, 2);
	schedule_as(OUTSIDE);
	k->out_of_order = true;
	schedule_kill(2);
}

static void begin_backlog(void)
{
	begin(0);
	publish(EARLY, 2, 0);
	come_to_publish(0);
	come_to_take(1, 0);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
}

/* A backlog of a paused topic that has got two channels; unpaused, to be pumped. */
static void begin_to_pump(void)
{
	begin(0);
	publish(EARLY, 2, 0);
	EQUAL(shmq_topic_pause(k->w->supervisor, k->topic, k->generation, true, soon()), 0);
	make_queue("channel");
	make_queue("channel");
	k->targets &= ~1u; /* what it has goes to them */
	k->pumps = true;
	EQUAL(shmq_topic_pause(k->w->supervisor, k->topic, k->generation, false, soon()), 0);
	come_to_publish(0);
	come_to_take(1, 1);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
}

/* Channel b is made, but not entered. */
static void begin_new_channel(void)
{
	int fd = memfd_create("queue", MFD_CLOEXEC);

	begin(1);
	EQUAL(shmq_queue_reserve(k->w->supervisor, soon(), &k->queue[1], &k->serial[1]), 0);
	k->w->queues[k->serial[1]] = fd;
	EQUAL(shmq_queue_create(k->w->supervisor, fd,
	                        &(shmq_queue_spec){.queue = k->queue[1],
	                                           .serial = k->serial[1],
	                                           .topic = k->topic,
	                                           .base = "t:b"}),
	      0);
	k->n = 2;
	k->late[1] = true;
	come_to_publish(0);
	come_to_take(1, 0);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
}

static void begin_to_attach(void)
{
	begin(1);
	for (uint32_t i = 0; i < 2; i++) {
		schedule_as(i);
		EQUAL(shmq_broker_open(k->w->directory, &k->actors[i].b), 0);
		schedule_as(OUTSIDE);
	}
}

static const play table[] = {
	/* the actors: 0 publishes, 1 takes, 2 one or the other, 3 supervises */
	PLAY("publish, take, pause", begin_with_supervisor, publish_one_0, take_one_1, pause_2),
	PLAY("publish, pump", begin_to_pump, publish_one_0, NULL, NULL, pump_3),
	PLAY("publish, take, pump", begin_to_pump, publish_one_0, take_other_1, NULL, pump_3),
	PLAY("publish, take over", begin_backlog, publish_one_0, NULL, NULL, take_over_3),
	PLAY("publish, a channel comes", begin_new_channel, publish_batch_0, NULL, NULL,
	     enter_channel_3),
	PLAY("lend and commit, a channel comes", begin_new_channel, loan_and_commit_0, NULL, NULL,
	     enter_channel_3),
	PLAY("publish, take, remove", begin_with_supervisor, publish_one_0, take_one_1, NULL,
	     remove_channel_3),
	PLAY("publish, wait, remove", begin_with_supervisor, NULL, wait_1, NULL, remove_channel_3),
	PLAY("publish, finish, rebuild", begin_taken, publish_one_0, finish_rest_1, NULL, rebuild_3),
	PLAY("publish, take, reap", begin_one_died, publish_one_0, take_one_1, NULL, reap_3),
	PLAY("publish, finish, give back", begin_taken_of_many, publish_one_0, finish_rest_1, NULL,
	     give_back_3),
	PLAY("publish, detach", begin_in_flight, publish_one_0, detach_1),
	PLAY("attach, attach", begin_to_attach, attach_0, attach_1),
};

const plays supervisor_plays = {table, sizeof(table) / sizeof(table[0])};
