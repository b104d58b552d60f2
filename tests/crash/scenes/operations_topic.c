/* Topics and channels: create, delete, take over, pump, pause, empty. */
#include "operations.h"

#include <string.h>

static void add_channel(scene *s, const char *name)
{
	uint64_t serial;
	uint32_t index = make_queue(s, s->home, name, &serial);

	add_queue(s, index, serial, true);
}

/* A backlog of all kinds, and two channels made while the topic was paused. */
static void a_backlog_to_move(scene *s)
{
	some_are_deferred(s);
	stage_oldest(s, s->home, 2);
	EQUAL(shmq_topic_pause(s->alive, s->topic, s->generation, true, soon()), 0);
	add_channel(s, "a");
	add_channel(s, "b");
	EQUAL(shmq_topic_pause(s->alive, s->topic, s->generation, false, soon()), 0);
	for (uint32_t i = 0; i < s->ledger->next; i++)
		s->ledger->fate[1][i] = s->ledger->fate[2][i] = NEVER;
	s->ledger->targets = 1;
	s->ledger->moves = true;
}

static void properties_to_move(scene *s)
{
	with_properties(s);
	a_backlog_to_move(s);
}

static int pump_with(scene *s, shmq_broker *b, uint32_t *moved)
{
	return CALL(s, b, shmq_pump(b, s->topic, s->generation, 100, soon(), moved));
}

static void pump(scene *s)
{
	uint32_t moved;

	EQUAL(pump_with(s, s->mine, &moved), 0);
	EQUAL(moved, 6);
}

static void pump_the_rest(scene *s)
{
	uint8_t (*fate)[MESSAGES] = s->ledger->fate;
	uint32_t moved;

	(void)pump_with(s, s->home, &moved);
	memcpy(fate[1], fate[0], MESSAGES);
	memcpy(fate[2], fate[0], MESSAGES);
	memset(fate[0], NEVER, MESSAGES);
	s->ledger->targets = 6;
	s->ledger->moves = false;
}

static void pause_and_go_on(scene *s)
{
	EQUAL(WATCHED(shmq_topic_pause(s->mine, s->topic, s->generation, true, soon())), 0);
	EQUAL(WATCHED(shmq_topic_pause(s->mine, s->topic, s->generation, false, soon())), 0);
	EQUAL(CALL(s, s->mine,
	           shmq_channel_pause(s->mine, first_queue(s), s->ledger->queue[0].serial, true,
	                              soon())),
	      0);
	EQUAL(WATCHED(shmq_channel_pause(s->mine, first_queue(s), s->ledger->queue[0].serial, false,
	                                 soon())),
	      0);
}

static void let_go_on(scene *s)
{
	EQUAL(shmq_topic_pause(s->alive, s->topic, s->generation, false, soon()), 0);
	EQUAL(CALL(s, s->alive,
	           shmq_channel_pause(s->alive, first_queue(s), s->ledger->queue[0].serial, false,
	                              soon())),
	      0);
}

static const shmq_settings strict = {.max_messages = 5,
                                     .max_bytes = 6000,
                                     .message_ttl = INT64_C(3600000000000),
                                     .retry_first = 8,
                                     .retry_most = 9,
                                     .max_attempts = 10,
                                     .overflow = SHMQ_OVERFLOW_REJECT,
                                     .flags = SHMQ_EXPIRED_TO_DEAD,
                                     .dead_letter = "dead"};
static const shmq_settings none;

static void configure_and_undo(scene *s)
{
	EQUAL(CALL(s, s->mine,
	           shmq_queue_configure(s->mine, first_queue(s), s->ledger->queue[0].serial, NULL,
	                                &strict, soon())),
	      0);
	EQUAL(WATCHED(shmq_queue_configure(s->mine, first_queue(s), s->ledger->queue[0].serial, NULL,
	                                   &none, soon())),
	      0);
}

static void configure_topic_and_undo(scene *s)
{
	EQUAL(CALL(s, s->mine,
	           shmq_topic_configure(s->mine, s->topic, s->generation, NULL, &strict, soon())),
	      0);
	EQUAL(WATCHED(shmq_topic_configure(s->mine, s->topic, s->generation, NULL, &none, soon())), 0);
}

static void settings_of_topic_are_whole(scene *s)
{
	shmq_settings now;

	EQUAL(CALL(s, s->alive, shmq_topic_settings(s->alive, s->topic, s->generation, soon(), &now)),
	      0);
	EQUAL(memcmp(&now, &strict, sizeof(now)) && memcmp(&now, &none, sizeof(now)), 0);
}

/* One of the two holds as a whole. */
static void settings_are_whole(scene *s)
{
	shmq_settings now;

	EQUAL(CALL(s, s->alive,
	           shmq_queue_settings(s->alive, first_queue(s), s->ledger->queue[0].serial, soon(),
	                               &now)),
	      0);
	EQUAL(memcmp(&now, &strict, sizeof(now)) && memcmp(&now, &none, sizeof(now)), 0);
	EQUAL(shmq_queue_configure(s->alive, first_queue(s), s->ledger->queue[0].serial, NULL, &none,
	                           soon()),
	      0);
}

/* The backlog's may be new before the topic's are. */
static void settings_of_both_are_whole(scene *s)
{
	settings_of_topic_are_whole(s);
	settings_are_whole(s);
}

static void everything_and_a_spill(scene *s)
{
	a_bit_of_everything(s);
	spill_begin(s, s->home, SHMQ_SPILL_READY, 5);
}

static void everything_and_a_file(scene *s)
{
	a_bit_of_everything(s);
	spill_begin(s, s->home, SHMQ_SPILL_READY, 4);
	spill_end(s, s->home);
}

static void empty_it(scene *s)
{
	uint64_t dropped;

	for (uint32_t i = 0; i < s->ledger->next; i++)
		s->ledger->fate[0][i] = EITHER;
	EQUAL(CALL(s, s->mine,
	           shmq_queue_empty(s->mine, first_queue(s), s->ledger->queue[0].serial, soon(),
	                            &dropped)),
	      0);
	EQUAL(dropped, s->ledger->next);
	for (uint32_t i = 0; i < s->ledger->next; i++)
		s->ledger->fate[0][i] = DONE;
}

/* As the_chunk_ends. */
static void the_spill_ends(scene *s)
{
	int r = CALL(s, s->home, shmq_spill_end(s->home, &s->spill, s->spill.bytes, true, soon()));

	CHECK(r == 0 || r == SHMQ_GONE);
	if (!r)
		s->ledger->written = s->spill.bytes;
}

static void create_topic(scene *s)
{
	uint32_t topic, generation;

	EQUAL(WATCHED(shmq_topic_create(s->mine, "another", 0, NULL, soon(), &topic, &generation)), 0);
}

static void create_topic_again(scene *s)
{
	uint32_t topic, generation, again, n = 0;

	EQUAL(shmq_topic_create(s->home, "another", 0, NULL, soon(), &topic, &generation), 0);
	EQUAL(shmq_topic_find(s->alive, "another", &again, &generation), 0);
	EQUAL(topic, again);
	for (uint32_t i = 0; i < directory_of(s)->topics_committed; i++)
		n += topics_of(s)[i].state == SHMQ_ENTRY_LIVE;
	EQUAL(n, 2);
}

static void create_channel(scene *s)
{
	uint64_t serial;

	(void)make_queue(s, s->mine, "new", &serial);
}

/* If the channel was not entered, its segment is created again, ready or not. */
static void create_channel_again(scene *s)
{
	uint64_t serial;
	uint32_t index;

	if (!shmq_queue_find(s->alive, s->topic, "new", &index, &serial))
		return;
	index = make_queue(s, s->home, "new", &serial);
	add_queue(s, index, serial, true);
}

static void take_over(scene *s)
{
	uint64_t serial;
	uint32_t index;

	EQUAL(CALL(s, s->mine,
	           shmq_queue_take_over(s->mine, s->topic, "a", NULL, soon(), &index, &serial)),
	      0);
	EQUAL(CALL(s, s->mine, shmq_queue_renamed(s->mine, index, "t:a", soon())), 0);
}

static void take_over_again(scene *s)
{
	uint64_t serial;
	uint32_t index;
	int r = CALL(s, s->home,
	             shmq_queue_take_over(s->home, s->topic, "a", NULL, soon(), &index, &serial));

	CHECK(r == 0 || r == SHMQ_INVALID);
	EQUAL(shmq_queue_find(s->alive, s->topic, NULL, &index, &serial), SHMQ_GONE);
	EQUAL(shmq_queue_find(s->alive, s->topic, "a", &index, &serial), 0);
	EQUAL(index, first_queue(s));
	CHECK(queue_of(s, 0)->base_pending || !strcmp(queue_of(s, 0)->base, "t:a"));
	EQUAL(CALL(s, s->home, shmq_queue_renamed(s->home, index, "t:a", soon())), 0);
}

static int remove_queue(scene *s, shmq_broker *b, uint32_t q)
{
	uint64_t serial = s->ledger->queue[q].serial;
	const shmq_queue_desc *desc = queue_of(s, q);

	return CALL(s, b,
	            shmq_queue_remove(b, s->ledger->queue[q].index, serial,
	                              desc->segment.ready == SHMQ_CLOSED_STATE, soon()));
}

static void forget_queue(scene *s, uint32_t q)
{
	for (uint32_t i = 0; i < s->ledger->next; i++)
		s->ledger->fate[q][i] = EITHER;
	s->ledger->leaving |= 1u << q;
}

static void remove_channel(scene *s)
{
	forget_queue(s, 1);
	EQUAL(remove_queue(s, s->mine, 1), 0);
}

static void erase_idle_channel(scene *s)
{
	bool erased;

	forget_queue(s, 1);
	EQUAL(CALL(s, s->mine,
	           shmq_queue_erase(s->mine, s->ledger->queue[1].index, s->ledger->queue[1].serial,
	                            true, soon(), &erased)),
	      0);
	CHECK(erased);
	EQUAL(entries_of(s)[s->ledger->queue[1].index].state, SHMQ_ENTRY_ERASING);
	EQUAL(remove_queue(s, s->mine, 1), 0);
}

static void remove_channel_again(scene *s)
{
	int r = remove_queue(s, s->home, 1);

	CHECK(r == 0 || r == SHMQ_GONE);
	EQUAL(entries_of(s)[s->ledger->queue[1].index].state, SHMQ_ENTRY_FREE);
}

static void remove_topic(scene *s)
{
	forget_queue(s, 0);
	EQUAL(remove_queue(s, s->mine, 0), 0);
	EQUAL(WATCHED(shmq_topic_remove(s->mine, s->topic, s->generation, soon())), 0);
}

static void remove_topic_again(scene *s)
{
	uint32_t topic, generation;
	shmq_body body = {"x", 1};
	uint64_t id;

	(void)remove_queue(s, s->home, 0);
	if (!shmq_topic_find(s->alive, "t", &topic, &generation))
		EQUAL(shmq_topic_remove(s->home, topic, generation, soon()), 0);
	EQUAL(shmq_topic_find(s->alive, "t", &topic, &generation), SHMQ_GONE);
	EQUAL(shmq_publish(s->producer, &body, 1, 0, soon(), &id), SHMQ_GONE);
}

static const operation table[] = {
	{"pause", 1, somebody_waits, come, pause_and_go_on, let_go_on, 0, 0, 0},
	{"configure", 1, somebody_waits, come, configure_and_undo, settings_are_whole, 0, 0, 0},
	{"configure topic and backlog", 0, NULL, come, configure_topic_and_undo,
	 settings_of_both_are_whole, 0, 0, 0},
	{"configure topic", 1, NULL, come, configure_topic_and_undo, settings_of_topic_are_whole, 0, 0,
	 0},
	{"empty", 1, a_bit_of_everything, come, empty_it, NULL, 0, 1, 0},
	{"empty during a spill", 1, everything_and_a_spill, come, empty_it, the_spill_ends, 0, 1, 0},
	{"empty with a file", 1, everything_and_a_file, come, empty_it, NULL, 0, 1, 0},
	{"empty with a chunk", 1, everything_and_a_chunk, come, empty_it, NULL, 0, 1, 0},
	{"empty during a chunk", 1, half_a_chunk, come, empty_it, the_chunk_ends, 0, 1, 0},
	{"create a topic", 1, NULL, come_to_supervise, create_topic, create_topic_again, 1, 0, 0},
	{"create a channel", 2, NULL, come_to_supervise, create_channel, create_channel_again, 1, 0, 0},
	{"take over", 0, NULL, come_to_supervise, take_over, take_over_again, 1, 0, 0},
	{"delete a channel", 2, NULL, come_to_supervise, remove_channel, remove_channel_again, 1, 0, 0},
	{"delete an idle channel", 2, NULL, come_to_supervise, erase_idle_channel, remove_channel_again,
	 1, 0, 0},
	{"delete a topic", 1, NULL, come_to_supervise, remove_topic, remove_topic_again, 1, 0, 0},
	{"pump", 0, a_backlog_to_move, come_to_supervise, pump, pump_the_rest, 1, 1, 0},
	{"pump properties", 0, properties_to_move, come_to_supervise, pump, pump_the_rest, 1, 1, 0},
};

const operations topic_operations = {table, sizeof(table) / sizeof(table[0])};
