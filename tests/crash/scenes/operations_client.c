/* Clients: attach, detach, requests, and their deaths. */
#include "operations.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void attach_one(scene *s)
{
	EQUAL(WATCHED(shmq_broker_open(s->files->fd[0], &s->mine)), 0);
	EQUAL(WATCHED(shmq_broker_attach(s->mine, SHMQ_AS_CLIENT, soon())), 0);
}

static void attach_to_supervise(scene *s)
{
	s->mine = attach(s, SHMQ_AS_SUPERVISOR);
	supervise(s, s->mine);
}

static void post_request(scene *s)
{
	uint32_t ticket;

	EQUAL(WATCHED(shmq_request_post(s->mine, SHMQ_CREATE_TOPIC, "u", NULL, soon(), &ticket)), 0);
	watch_begin();
	shmq_request_end(s->mine, ticket);
	watch_end();
}

void somebody_asks(scene *s)
{
	uint32_t ticket;

	EQUAL(shmq_request_post(s->alive, SHMQ_CREATE_TOPIC, "u", NULL, soon(), &ticket), 0);
}

static void answer_request(scene *s)
{
	shmq_request request;

	EQUAL(WATCHED(shmq_request_next(s->mine, soon(), &request)), 0);
	watch_begin();
	shmq_request_answer(s->mine, request.ticket, 0, NULL);
	watch_end();
}

/* Abandoned ones are freed; nothing of the dead is left to answer. */
void no_request_is_left(scene *s)
{
	const shmq_request_desc *requests = (const void *)(s->files->map[0] +
	                                                   directory_of(s)->requests_at);
	shmq_request request;

	EQUAL(shmq_request_next(s->home, soon(), &request), SHMQ_EMPTY);
	for (uint32_t i = 0; i < SHMQ_REQUESTS; i++)
		EQUAL(requests[i].state, SHMQ_REQUEST_FREE);
}

/* It waits still, or has its answer. */
static void the_request_is_there(scene *s)
{
	const shmq_request_desc *requests = (const void *)(s->files->map[0] +
	                                                   directory_of(s)->requests_at);

	CHECK(requests[0].state == SHMQ_REQUEST_POSTED || requests[0].state == SHMQ_REQUEST_DONE);
}

static void come_and_hold_everything(scene *s)
{
	uint32_t ticket;

	come_take_and_pin(s);
	finish_one(s);
	lend(s);
	wait_on_first(s, s->mine, BELL + 1);
	EQUAL(shmq_request_post(s->mine, SHMQ_CREATE_TOPIC, "u", NULL, soon(), &ticket), 0);
}

static void leave(scene *s)
{
	EQUAL(CALL(s, s->mine, shmq_broker_detach(s->mine, soon())), 0);
}

/* A client dies in the preparation, and holds the publish lock (1) or the deliver lock (2) or both. */
void a_death(scene *s, void (*ready)(scene *), unsigned locks)
{
	pid_t pid = fork();
	int status;

	CHECK(pid >= 0);
	if (!pid) {
		ready(s);
		if (locks & 1)
			pthread_mutex_lock(&topics_of(s)[s->topic].publish.mutex);
		if (locks & 2)
			pthread_mutex_lock(&queue_of(s, 0)->deliver.mutex);
		raise(SIGKILL);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

void somebody_died(scene *s)
{
	a_death(s, come_and_hold_everything, 0);
}

static const operation table[] = {
	{"ask the supervisor", 1, NULL, come, post_request, no_request_is_left, 0, 0, 0},
	{"answer a client", 1, somebody_asks, come_to_supervise, answer_request, the_request_is_there,
	 1, 0, 0},
	{"attach", 1, NULL, NULL, attach_one, NULL, 0, 0, 0},
	{"attach to supervise", 1, NULL, NULL, attach_to_supervise, NULL, 1, 0, 0},
	{"detach", 2, NULL, come_and_hold_everything, leave, no_request_is_left, 0, 0, 0},
};

const operations client_operations = {table, sizeof(table) / sizeof(table[0])};
