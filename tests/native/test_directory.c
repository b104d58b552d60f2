/* Names and entries; full tables; requests. */
#include "harness.h"

static void names_are_nsqds(void)
{
	static const char *const good[] = {"a", "Topic_1.x-y", "x#ephemeral", "0", "."};
	static const char *const bad[] = {
		"", "a b", "a/b", "#ephemeral", "x#ephemeral2", "x#", "\xc3\xa9", "a#ephemeral#ephemeral"};
	char longest[66];

	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
		CHECK(shmq_name_valid(good[i], strlen(good[i])));
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		CHECK(!shmq_name_valid(bad[i], strlen(bad[i])));
	memset(longest, 'a', sizeof(longest));
	CHECK(shmq_name_valid(longest, 64));
	CHECK(!shmq_name_valid(longest, 65));
	memcpy(longest + 54, "#ephemeral", 10);
	CHECK(shmq_name_valid(longest, 64));
	CHECK(shmq_name_ephemeral(longest, 64));
	CHECK(!shmq_name_ephemeral("#ephemeral", 10)); /* nothing before it */
	CHECK(!shmq_name_valid("a\0b", 3));
}

static void a_topic_is_created_once_and_found_by_its_whole_name(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t a, b, found, generation, other;
	char name[66] = {0};

	EQUAL(shmq_topic_create(w->supervisor, "no good", 0, NULL, soon(), &a, &generation),
	      SHMQ_BAD_NAME);
	a = world_topic(w, "topic", &generation);
	EQUAL(world_topic(w, "topic", &other), a);
	EQUAL(other, generation);
	b = world_topic(w, "topic2", &other);
	CHECK(a != b);
	EQUAL(shmq_topic_find(w->supervisor, "topic", &found, &generation), 0);
	EQUAL(found, a);
	EQUAL(shmq_topic_find(w->supervisor, "top", &found, &generation), SHMQ_GONE);
	memset(name, 'n', 64);
	a = world_topic(w, name, &generation);
	EQUAL(shmq_topic_find(w->supervisor, name, &found, &generation), 0);
	EQUAL(found, a);
	name[63] = 0;
	EQUAL(shmq_topic_find(w->supervisor, name, &found, &generation), SHMQ_GONE);
	world_stop(w);
}

static void a_queue_is_entered_and_found(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, found;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	uint64_t serial, again;

	EQUAL(shmq_queue_find(b, topic, "c", &found, &again), SHMQ_GONE);
	queue = world_queue(w, topic, "c", &serial);
	EQUAL(shmq_queue_find(b, topic, "c", &found, &again), 0);
	EQUAL(found, queue);
	EQUAL(again, serial);
	EQUAL(shmq_queue_find(b, topic, NULL, &found, &again), SHMQ_GONE);
	/* its name is taken, its index is taken */
	EQUAL(shmq_queue_enter(w->supervisor, queue + 1, 77, topic, "c", soon()), SHMQ_INVALID);
	EQUAL(shmq_queue_enter(w->supervisor, queue, 77, topic, "d", soon()), SHMQ_INVALID);
	EQUAL(shmq_queue_enter(w->supervisor, queue + 1, 77, topic, "d d", soon()), SHMQ_BAD_NAME);
	EQUAL(shmq_queue_enter(w->supervisor, queue + 1, 77, topic + 1, "d", soon()), SHMQ_GONE);
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	world_stop(w);
}

static int remove_queue(world *w, uint32_t queue, uint64_t serial)
{
	return MAPPED(w, w->supervisor, shmq_queue_remove(w->supervisor, queue, serial, false, soon()));
}

/* A new queue with the index of a removed one. */
static uint64_t use_index_again(world *w, uint32_t queue, uint32_t topic)
{
	int fd = memfd_create("queue", MFD_CLOEXEC);
	uint32_t found;
	uint64_t serial;

	EQUAL(shmq_queue_reserve(w->supervisor, soon(), &found, &serial), 0);
	EQUAL(found, queue);
	w->queues[serial] = fd;
	EQUAL(shmq_queue_create(w->supervisor, fd,
	                        &(shmq_queue_spec){
								.queue = found, .serial = serial, .topic = topic, .base = "t:c"}),
	      0);
	EQUAL(MAPPED(w, w->supervisor,
	             shmq_queue_enter(w->supervisor, found, serial, topic, "c", soon())),
	      0);
	return serial;
}

static void handles_on_a_removed_queue_are_told(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), found, got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	uint64_t serial, again, id;
	uint32_t queue = world_queue(w, topic, "c", &serial);
	shmq_body body = {"x", 1};
	shmq_producer *p;
	shmq_consumer *c;
	shmq_message m;

	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	EQUAL(world_publish(w, b, p, "x"), 0);
	c = world_consumer(w, b, queue, serial, 10);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
	EQUAL(shmq_pin(c, &m, soon()), 0);
	EQUAL(remove_queue(w, queue, serial + 1), SHMQ_GONE);
	EQUAL(remove_queue(w, queue, serial), 0);
	EQUAL(shmq_queue_remove(w->supervisor, queue, serial, false, soon()), SHMQ_GONE);
	EQUAL(shmq_queue_find(b, topic, "c", &found, &again), SHMQ_GONE);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), SHMQ_GONE);
	EQUAL(shmq_finish(c, &m, 1, NULL, soon()), SHMQ_GONE);
	EQUAL(shmq_requeue(c, &m, 1, 0, NULL, soon()), SHMQ_GONE);
	CHECK(body_is(&m, "x")); /* a view stays readable */
	EQUAL(shmq_unpin(c, &m, soon()), 0);
	for (uint32_t i = 0; i < SHMQ_PINS; i++)
		EQUAL(ld(&b->clients[b->client].pins[i]), 0); /* and gives its place in the log back */
	EQUAL(shmq_consumer_wait(c, soon()), 0);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	EQUAL(shmq_publish(p, &body, 1, 0, soon(), &id), SHMQ_NEED_BACKLOG);

	/* the index is used again, with another serial number */
	again = use_index_again(w, queue, topic);
	CHECK(again > serial);
	EQUAL(shmq_consumer_open(b, queue, serial, 1, 0, soon(), &c), SHMQ_NEED_MAP); /* let go of */
	EQUAL(world_publish(w, b, p, "y"), 0);
	c = world_consumer(w, b, queue, again, 10);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
	CHECK(body_is(&m, "y"));
	SOUND(w);
	world_leave(w, b, p, c);
	world_stop(w);
}

static void a_topic_is_removed_after_its_queues(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), found;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	uint64_t serial, id;
	uint32_t queue = world_queue(w, topic, "c", &serial);
	shmq_body body = {"x", 1};
	shmq_producer *p;

	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	EQUAL(world_publish(w, b, p, "x"), 0);
	EQUAL(shmq_topic_remove(w->supervisor, topic, generation, soon()), SHMQ_INVALID);
	EQUAL(remove_queue(w, queue, serial), 0);
	EQUAL(shmq_topic_remove(w->supervisor, topic, generation + 1, soon()), SHMQ_GONE);
	EQUAL(shmq_topic_remove(w->supervisor, topic, generation, soon()), 0);
	EQUAL(shmq_topic_remove(w->supervisor, topic, generation, soon()), SHMQ_GONE);
	EQUAL(shmq_publish(p, &body, 1, 0, soon(), &id), SHMQ_GONE);
	EQUAL(shmq_topic_pause(b, topic, generation, true, soon()), SHMQ_GONE);
	EQUAL(world_topic(w, "t", &found), topic); /* the same place, another generation */
	CHECK(found != generation);
	EQUAL(shmq_publish(p, &body, 1, 0, soon(), &id), SHMQ_GONE);
	EQUAL(shmq_topic_pause(b, topic, generation, true, soon()), SHMQ_GONE);
	shmq_producer_close(p);
	EQUAL(MAPPED(w, b, shmq_broker_detach(b, soon())), 0);
	shmq_broker_close(b);
	world_stop(w);
}

static void an_idle_queue_is_erased_and_one_with_a_consumer_is_not(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, found, got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	uint64_t serial, again;
	shmq_consumer *c, *d;
	shmq_message m;
	bool erased;

	queue = world_queue(w, topic, "c#ephemeral", &serial);
	c = world_consumer(w, b, queue, serial, 10);
	EQUAL(MAPPED(w, w->supervisor,
	             shmq_queue_erase(w->supervisor, queue, serial, true, soon(), &erased)),
	      0);
	CHECK(!erased);
	EQUAL(shmq_queue_find(b, topic, "c#ephemeral", &found, &again), 0);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), SHMQ_EMPTY);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	/* with the publish lock held, a deliver lock that is held is not waited for */
	EQUAL(lock_take(&c->map->q->deliver, 0), 0);
	EQUAL(shmq_queue_erase(w->supervisor, queue, serial, true, soon(), &erased), 0);
	CHECK(!erased);
	lock_drop(&c->map->q->deliver);
	shmq_consumer_free(c);
	EQUAL(shmq_queue_erase(w->supervisor, queue, serial, true, soon(), &erased), 0);
	CHECK(erased);
	EQUAL(shmq_queue_find(b, topic, "c#ephemeral", &found, &again), SHMQ_GONE);
	EQUAL(shmq_consumer_open(b, queue, serial, 1, 0, soon(), &d), SHMQ_GONE);
	EQUAL(shmq_queue_reserve(w->supervisor, soon(), &found, &again), 0);
	CHECK(found != queue); /* its entry stays until its files are deleted */
	EQUAL(shmq_queue_remove(w->supervisor, queue, serial, true, soon()), 0);
	EQUAL(shmq_queue_erase(w->supervisor, queue, serial, true, soon(), &erased), SHMQ_GONE);
	EQUAL(shmq_queue_reserve(w->supervisor, soon(), &found, &again), 0);
	EQUAL(found, queue);
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	world_stop(w);
}

static void a_backlog_is_taken_over_once(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), backlog, queue, got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	uint64_t serial, again;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_message m;

	EQUAL(shmq_queue_take_over(w->supervisor, topic, "c", NULL, soon(), &queue, &again), SHMQ_GONE);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	EQUAL(world_publish(w, b, p, "x"), SHMQ_NEED_BACKLOG);
	backlog = world_queue(w, topic, NULL, &serial);
	EQUAL(world_publish(w, b, p, "x"), 0);
	EQUAL(shmq_topic_pause(b, topic, generation, true, soon()), 0);
	EQUAL(MAPPED(w, w->supervisor,
	             shmq_queue_take_over(w->supervisor, topic, "c", NULL, soon(), &queue, &again)),
	      SHMQ_INVALID);
	EQUAL(shmq_topic_pause(b, topic, generation, false, soon()), 0);
	EQUAL(MAPPED(w, w->supervisor,
	             shmq_queue_take_over(w->supervisor, topic, "c", NULL, soon(), &queue, &again)),
	      0);
	EQUAL(queue, backlog);
	EQUAL(again, serial);
	EQUAL(shmq_queue_find(b, topic, NULL, &queue, &again), SHMQ_GONE);
	EQUAL(MAPPED(w, w->supervisor,
	             shmq_queue_take_over(w->supervisor, topic, "d", NULL, soon(), &queue, &again)),
	      SHMQ_INVALID);
	EQUAL(world_publish(w, b, p, "y"), 0);
	c = world_consumer(w, b, backlog, serial, 10);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
	CHECK(body_is(&m, "x"));
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
	CHECK(body_is(&m, "y"));
	SOUND(w);
	world_leave(w, b, p, c);
	world_stop(w);
}

__attribute__((unused)) static void a_full_client_table_is_a_clear_error(void)
{
	world *w = world_start(small_limits(300, 300));
	static shmq_broker *all[SHMQ_CLIENTS];
	shmq_broker *one_more;
	uint32_t n = 1; /* the supervisor is one */

	for (; n < SHMQ_CLIENTS; n++)
		all[n] = world_attach(w, SHMQ_AS_CLIENT);
	EQUAL(shmq_broker_open(w->directory, &one_more), 0);
	EQUAL(shmq_broker_attach(one_more, SHMQ_AS_CLIENT, soon()), SHMQ_TOO_MANY_CLIENTS);
	EQUAL(shmq_broker_detach(all[500], soon()), 0);
	EQUAL(shmq_broker_detach(all[500], soon()), 0); /* twice is once */
	EQUAL(shmq_broker_attach(one_more, SHMQ_AS_CLIENT, soon()), 0);
	EQUAL(shmq_broker_client(one_more), 500);
	EQUAL(shmq_broker_attach(all[500], SHMQ_AS_CLIENT, soon()), SHMQ_TOO_MANY_CLIENTS);
	EQUAL(shmq_broker_detach(one_more, soon()), 0);
	shmq_broker_close(one_more);
	for (n = 1; n < SHMQ_CLIENTS; n++) {
		EQUAL(shmq_broker_detach(all[n], soon()), 0);
		shmq_broker_close(all[n]);
	}
	world_stop(w);
}

static void full_tables_of_topics_and_queues_are_clear_errors(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t topic, generation, queue;
	uint64_t serial;

	/* As if all were taken: creating 16384 takes the square of that in name comparisons. */
	world_topic(w, "first", &generation);
	EQUAL(segment_commit(w->supervisor->base, w->supervisor->d->topics_at,
	                     SHMQ_TOPICS * sizeof(shmq_topic_desc)),
	      0);
	for (uint32_t i = 0; i < SHMQ_TOPICS; i++)
		st(&w->supervisor->topics[i].state, SHMQ_ENTRY_LIVE);
	st(&w->supervisor->d->topics_committed, SHMQ_TOPICS);
	EQUAL(shmq_topic_create(w->supervisor, "one.more", 0, NULL, soon(), &topic, &generation),
	      SHMQ_TABLE_FULL);
	EQUAL(segment_commit(w->supervisor->base, w->supervisor->d->queues_at,
	                     SHMQ_QUEUES * sizeof(shmq_entry_desc)),
	      0);
	for (uint32_t i = 0; i < SHMQ_QUEUES; i++)
		st(&w->supervisor->entries[i].state, SHMQ_ENTRY_LIVE);
	st(&w->supervisor->d->queues_committed, SHMQ_QUEUES);
	EQUAL(shmq_queue_reserve(w->supervisor, soon(), &queue, &serial), SHMQ_TABLE_FULL);
	for (uint32_t i = 0; i < SHMQ_QUEUES; i++)
		st(&w->supervisor->entries[i].state, SHMQ_ENTRY_FREE);
	st(&w->supervisor->entries[SHMQ_QUEUES - 1].state, SHMQ_ENTRY_FREE);
	EQUAL(shmq_queue_reserve(w->supervisor, soon(), &queue, &serial), 0);
	EQUAL(queue, 0);
	world_stop(w);
}

static void sessions_fill_up_to_their_table(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	static shmq_consumer *all[SHMQ_SESSIONS];
	shmq_consumer *one_more;
	uint64_t serial;

	queue = world_queue(w, topic, "c", &serial);
	for (uint32_t i = 0; i < SHMQ_SESSIONS; i++)
		all[i] = world_consumer(w, b, queue, serial, 1);
	EQUAL(shmq_consumer_open(b, queue, serial, 1, 0, soon(), &one_more), SHMQ_TABLE_FULL);
	EQUAL(shmq_consumer_close(all[77], soon()), 0);
	EQUAL(shmq_consumer_open(b, queue, serial, 1, 0, soon(), &one_more), 0);
	EQUAL(shmq_consumer_close(one_more, soon()), 0);
	shmq_consumer_free(one_more);
	for (uint32_t i = 0; i < SHMQ_SESSIONS; i++) {
		EQUAL(shmq_consumer_close(all[i], soon()), 0);
		EQUAL(shmq_consumer_close(all[i], soon()), 0);
		shmq_consumer_free(all[i]);
	}
	SOUND(w);
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	world_stop(w);
}

static void a_request_is_posted_answered_and_ended(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	uint32_t ticket, why;
	shmq_request request;

	EQUAL(shmq_supervisor_wait(w->supervisor, soon(), &why), 0);
	EQUAL(shmq_request_post(b, SHMQ_CREATE_TOPIC, "b d", NULL, soon(), &ticket), SHMQ_BAD_NAME);
	EQUAL(shmq_request_post(b, SHMQ_CREATE_CHANNEL, "t", "c d", soon(), &ticket), SHMQ_BAD_NAME);
	EQUAL(shmq_request_next(w->supervisor, soon(), &request), SHMQ_EMPTY);
	EQUAL(shmq_request_post(b, SHMQ_CREATE_CHANNEL, "t", "c", soon(), &ticket), 0);
	EQUAL(shmq_supervisor_wait(w->supervisor, soon(), &why), 0);
	CHECK(why & SHMQ_RING_REQUEST);
	EQUAL(shmq_request_next(w->supervisor, soon(), &request), 0);
	EQUAL(request.ticket, ticket);
	EQUAL(request.kind, SHMQ_CREATE_CHANNEL);
	EQUAL(request.client, shmq_broker_client(b));
	CHECK(!strcmp(request.topic, "t") && !strcmp(request.channel, "c"));
	EQUAL(shmq_request_wait(b, ticket, shmq_now()), SHMQ_TIMEOUT);
	shmq_request_answer(w->supervisor, ticket, SHMQ_TABLE_FULL, NULL);
	EQUAL(shmq_request_wait(b, ticket, soon()), SHMQ_TABLE_FULL);
	shmq_request_end(b, ticket);
	EQUAL(ld(&b->requests[ticket].state), SHMQ_REQUEST_FREE);
	EQUAL(shmq_request_next(w->supervisor, soon(), &request), SHMQ_EMPTY);
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	world_stop(w);
}

static void an_abandoned_request_is_freed(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	uint32_t tickets[SHMQ_REQUESTS], one_more;
	shmq_request request;

	for (uint32_t i = 0; i < SHMQ_REQUESTS; i++)
		EQUAL(shmq_request_post(b, SHMQ_CREATE_TOPIC, "t", NULL, soon(), &tickets[i]), 0);
	EQUAL(shmq_request_post(b, SHMQ_CREATE_TOPIC, "t", NULL, soon(), &one_more), SHMQ_AGAIN);
	EQUAL(shmq_request_next(w->supervisor, soon(), &request), 0);
	shmq_request_end(b, request.ticket); /* its owner lost patience while it was worked on */
	EQUAL(ld(&b->requests[request.ticket].state), SHMQ_REQUEST_ABANDONED);
	shmq_request_answer(w->supervisor, request.ticket, 0, NULL);
	EQUAL(ld(&b->requests[request.ticket].state), SHMQ_REQUEST_FREE);
	for (uint32_t i = 0; i < SHMQ_REQUESTS; i++)
		if (tickets[i] != request.ticket)
			shmq_request_end(b, tickets[i]);
	EQUAL(shmq_request_next(w->supervisor, soon(), &request), SHMQ_EMPTY);
	for (uint32_t i = 0; i < SHMQ_REQUESTS; i++)
		EQUAL(ld(&b->requests[i].state), SHMQ_REQUEST_FREE);
	/* every doorbell is back, the refused one too */
	EQUAL(b->idle_count, SHMQ_REQUESTS + 1);
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	world_stop(w);
}

static void a_stopping_or_closed_broker_says_so(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, ticket, got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT), *late;
	uint64_t serial, id;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_message m;
	shmq_body body = {"x", 1};

	queue = world_queue(w, topic, "c", &serial);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	c = world_consumer(w, b, queue, serial, 1);
	EQUAL(world_publish(w, b, p, "x"), 0);
	shmq_supervisor_stopping(w->supervisor);
	EQUAL(shmq_broker_open(w->directory, &late), 0);
	EQUAL(shmq_broker_attach(late, SHMQ_AS_CLIENT, soon()), SHMQ_NOT_RUNNING);
	EQUAL(shmq_request_post(b, SHMQ_CREATE_TOPIC, "u", NULL, soon(), &ticket), SHMQ_NOT_RUNNING);
	EQUAL(shmq_publish(p, &body, 1, 0, soon(), &id), SHMQ_NOT_RUNNING);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0); /* what is there may still be taken */
	EQUAL(shmq_finish(c, &m, 1, NULL, soon()), 0);
	shmq_directory_close(w->supervisor);
	EQUAL(shmq_broker_attach(late, SHMQ_AS_CLIENT, soon()), SHMQ_GONE);
	shmq_broker_close(late);
	EQUAL(shmq_broker_open(w->directory, &late), SHMQ_GONE);
	EQUAL(shmq_publish(p, &body, 1, 0, soon(), &id), SHMQ_GONE);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), SHMQ_GONE);
	EQUAL(shmq_request_post(b, SHMQ_CREATE_TOPIC, "u", NULL, soon(), &ticket), SHMQ_GONE);
	world_leave(w, b, p, c);
	world_stop(w);
}

static void a_forked_child_may_use_no_handle(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	uint64_t serial, id;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_message m;
	int status;
	pid_t pid;

	queue = world_queue(w, topic, "c", &serial);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	c = world_consumer(w, b, queue, serial, 5);
	EQUAL(world_publish(w, b, p, "x"), 0);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
	EQUAL(shmq_pin(c, &m, soon()), 0);
	pid = fork();
	if (!pid) {
		shmq_body body = {"x", 1};
		uint32_t ticket;

		CHECK(shmq_broker_forked(b));
		EQUAL(shmq_publish(p, &body, 1, 0, soon(), &id), SHMQ_FORKED);
		EQUAL(shmq_take(c, &m, 1, soon(), &got), SHMQ_FORKED);
		EQUAL(shmq_finish(c, &m, 1, NULL, soon()), SHMQ_FORKED);
		EQUAL(shmq_pin(c, &m, soon()), SHMQ_FORKED);
		EQUAL(shmq_unpin(c, &m, soon()), 0);
		EQUAL(shmq_consumer_wait(c, soon()), SHMQ_FORKED);
		EQUAL(shmq_request_post(b, SHMQ_CREATE_TOPIC, "u", NULL, soon(), &ticket), SHMQ_FORKED);
		EQUAL(shmq_broker_attach(b, SHMQ_AS_CLIENT, soon()), SHMQ_FORKED);
		world_leave(w, b, p, c);
		b = world_attach(w, SHMQ_AS_CLIENT); /* again */
		EQUAL(MAPPED(w, b, shmq_broker_detach(b, soon())), 0);
		_exit(0);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
	EQUAL(shmq_reap_scan(w->supervisor, &(shmq_dead){0}, 1, &got), 0);
	EQUAL(got, 0);
	EQUAL(shmq_finish(c, &m, 1, NULL, soon()), 0); /* nothing was taken from the parent */
	CHECK(body_is(&m, "x"));
	EQUAL(shmq_unpin(c, &m, soon()), 0);
	SOUND(w);
	world_leave(w, b, p, c);
	world_stop(w);
}

int main(void)
{
	names_are_nsqds();
	a_topic_is_created_once_and_found_by_its_whole_name();
	a_queue_is_entered_and_found();
	handles_on_a_removed_queue_are_told();
	a_topic_is_removed_after_its_queues();
	an_idle_queue_is_erased_and_one_with_a_consumer_is_not();
	a_backlog_is_taken_over_once();
#ifndef __SANITIZE_THREAD__ /* which lets a thread hold 64 locks; here one has \
                               1024 clients */
	a_full_client_table_is_a_clear_error();
#endif
	full_tables_of_topics_and_queues_are_clear_errors();
	sessions_fill_up_to_their_table();
	a_request_is_posted_answered_and_ended();
	an_abandoned_request_is_freed();
	a_stopping_or_closed_broker_says_so();
	a_forked_child_may_use_no_handle();
	return 0;
}
