/* The supervisor: adoption, rebuilds, memory that is given back, the directory itself. */
#include "operations.h"

/* Three messages are in flight; after their bodies in the arena there were larger ones. */
static void much_was_there(scene *s)
{
	publish(s, s->alive, s->producer, 3, SMALL, 0);
	take_alive(s, 3);
	publish(s, s->alive, s->producer, 4, 8000, 0);
	EQUAL(shmq_take(s->consumer, s->m, 8, soon(), &s->got), 0);
	EQUAL(s->got, 8);
	finish(s, 0, s->consumer, s->m, s->got);
	CHECK(queue_of(s, 0)->arena_committed > SHMQ_ARENA_FIRST);
}

static void give_back(scene *s)
{
	uint64_t bytes;

	EQUAL(CALL(s, s->mine, shmq_trim(s->mine, first_queue(s), soon(), &bytes)), 0);
	CHECK(bytes >= 8000);
}

static void give_back_again(scene *s)
{
	uint64_t bytes;

	EQUAL(CALL(s, s->home, shmq_trim(s->home, first_queue(s), soon(), &bytes)), 0);
	publish(s, s->alive, s->producer, 4, 8000, 0); /* it grows again */
}

/* The order of the slots is not that of the messages. */
static void the_slots_wrap(scene *s)
{
	eight_more(s);
	take_alive(s, 6);
	finish(s, 0, s->consumer, s->m, 6);
	eight_more(s);
}

static void come_and_spill_halfway(scene *s)
{
	come_to_supervise(s);
	stage_four(s);
	spill_begin(s, s->mine, SHMQ_SPILL_READY, 6);
}

static void the_supervisor_died(scene *s)
{
	eight_more(s);
	a_death(s, come_and_spill_halfway, 3);
}

/* The doorbell, what rang it and for which queue. */
static void wait_to_supervise(scene *s)
{
	uint32_t why, queues[64];

	watch_begin();
	shmq_scan_at(s->mine, shmq_now(), shmq_realtime());
	shmq_spiller_request(s->mine, first_queue(s));
	watch_end();
	EQUAL(WATCHED(shmq_supervisor_wait(s->mine, shmq_now(), &why)), 0);
	EQUAL(WATCHED(shmq_spiller_pending(s->mine, queues, 64)), 1);
}

static void reap(scene *s)
{
	reap_all(s, s->mine);
}

static void spare_them(scene *s)
{
	uint32_t found;
	shmq_dead dead[4];

	EQUAL(WATCHED(shmq_reap_scan(s->mine, dead, 4, &found)), 0);
	EQUAL(found, 1);
	watch_begin();
	shmq_reap_spare(s->mine, dead[0].client, dead[0].generation);
	watch_end();
}

/* As its process ends at last: its entry is watched by its pid, and is reaped when that is gone. */
static void spared_ones_end(scene *s)
{
	uint32_t returned;

	for (uint32_t i = 0; i < directory_of(s)->clients_committed; i++)
		if (clients_of(s)[i].state == SHMQ_CLIENT_LIVE && clients_of(s)[i].orphan)
			EQUAL(CALL(s, s->home,
			           shmq_reap(s->home, i, clients_of(s)[i].generation, soon(), &returned)),
			      0);
	no_request_is_left(s);
}

static void ask_for_the_supervisor(scene *s)
{
	CHECK(!WATCHED(shmq_supervisor_alive(s->mine)));
}

static void rebuild(scene *s)
{
	EQUAL(WATCHED(shmq_rebuild(s->mine, first_queue(s), soon())), 0);
}

static void adopt(scene *s)
{
	adopt_all(s, s->mine);
}

static void create_directory(scene *s)
{
	EQUAL(WATCHED(shmq_directory_create(s->files->fd[FILES - 1], &s->limits, NULL)), 0);
}

/* Opening it is refused, or it is whole. */
static void directory_is_there(scene *s)
{
	int fd = s->files->fd[FILES - 1], r;
	shmq_broker *b;

	r = shmq_broker_open(fd, &b);
	if (r) {
		EQUAL(r, SHMQ_NOT_READY);
		return;
	}
	EQUAL(shmq_broker_attach(b, SHMQ_AS_SUPERVISOR, soon()), 0);
	EQUAL(shmq_supervise(b, &s->limits, soon()), 0);
	EQUAL(shmq_topic_create(b, "t", 0, NULL, soon(), &s->topic, &s->generation), 0);
}

static void close_directory(scene *s)
{
	watch_begin();
	shmq_supervisor_stopping(s->mine);
	shmq_directory_close(s->mine);
	watch_end();
}

/* No client attaches to a closed directory; if it is not closed, it works. */
static void nobody_attaches(scene *s)
{
	shmq_broker *b;
	int r = shmq_broker_open(s->files->fd[0], &b);

	if (!r)
		r = shmq_broker_attach(b, SHMQ_AS_CLIENT, soon());
	CHECK(r == 0 || r == SHMQ_GONE || r == SHMQ_NOT_RUNNING);
}

static const operation table[] = {
	{.name = "create a directory",
	 .act = create_directory,
	 .after = directory_is_there,
	 .channels = 1,
	 .alone = true},
	{"give memory back", 1, much_was_there, come_to_supervise, give_back, give_back_again, 1, 1, 0},
	{"wait for work", 1, somebody_asks, come_to_supervise, wait_to_supervise, NULL, 1, 0, 0},
	{"reap", 2, somebody_died, come_to_supervise, reap, no_request_is_left, 1, 0, 0},
	{"spare a client", 2, somebody_died, come_to_supervise, spare_them, spared_ones_end, 1, 0, 0},
	{"ask whether the supervisor lives", 1, the_supervisor_died, come, ask_for_the_supervisor, NULL,
	 1, 0, 0},
	{"reap a lease holder", 1, somebody_died_leasing, come_to_supervise, reap, leases_are_whole, 1,
	 0, 0},
	{"rebuild", 1, a_bit_of_everything, come_to_supervise, rebuild, NULL, 1, 1, 0},
	{"rebuild what has wrapped", 1, the_slots_wrap, come_to_supervise, rebuild, NULL, 1, 0, 0},
	{"adopt", 1, the_supervisor_died, come_to_supervise, adopt, NULL, 1, 0, 0},
	{.name = "close the directory",
	 .channels = 1,
	 .ready = come_to_supervise,
	 .act = close_directory,
	 .after = nobody_attaches,
	 .alone = true},
};

const operations supervisor_operations = {table, sizeof(table) / sizeof(table[0])};
