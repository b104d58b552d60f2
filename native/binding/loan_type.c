/*
 * _native.Loan: a body written in place.
 *
 *   NEW --__enter__--> OPEN --__exit__--> OVER (published, or cancelled)
 *                        `--the object is freed, or a buffer outlives the block--> cancelled
 *
 * As long as a buffer of the loan lives, its memory must stay a loan; so it is cancelled when the
 * last buffer is released.
 */
#include "types.h"

#include <string.h>

enum loan_state { LOAN_NEW, LOAN_OPEN, LOAN_OVER };

typedef struct loan_object {
	PyObject_HEAD
	producer_object *producer;
	shmq_loan *handle;
	PyObject *id;    /* str, or NULL if it is not published */
	PyObject *view;  /* weak reference to the memoryview from __enter__ */
	PyObject *block; /* bytes: its properties, or NULL */
	uint64_t length;
	int64_t defer, timeout;
	uint32_t exports, epoch;
	enum loan_state state;
	bool zero; /* clear the buffer first: it has bytes of earlier messages */
} loan_object;

static bool loan_ours(const loan_object *self)
{
	return self->epoch == self->producer->epoch &&
	       !(self->producer->broker->handle && shmq_broker_forked(self->producer->broker->handle));
}

/* Cancel the loan. If a lock is held elsewhere, the producer does it later. */
static void loan_drop(loan_object *self)
{
	shmq_loan *handle = self->handle;
	pending_loan *pending;

	self->state = LOAN_OVER;
	self->handle = NULL;
	if (!handle)
		return;
	if (!loan_ours(self) || self->producer->broker->closed ||
	    shmq_loan_cancel(handle, 0) != SHMQ_AGAIN) {
		loan_handle_free(self->producer, handle);
		return;
	}
	pending = PyMem_Malloc(sizeof(*pending));
	if (!pending) /* the reaper cancels it when this process ends */
		return;
	*pending = (pending_loan){self->producer->pending, handle};
	self->producer->pending = pending;
}

PyObject *loan_new(producer_object *producer, uint64_t length, PyObject *block, int64_t defer,
                   int64_t timeout, bool zero)
{
	loan_object *self = PyObject_New(loan_object, producer->state->loan);

	if (!self) {
		Py_XDECREF(block);
		return NULL;
	}
	self->block = block;
	self->producer = (producer_object *)Py_NewRef((PyObject *)producer);
	self->handle = NULL;
	self->id = self->view = NULL;
	self->length = length;
	self->defer = defer;
	self->timeout = timeout;
	self->exports = 0;
	self->epoch = 0;
	self->state = LOAN_NEW;
	self->zero = zero;
	return (PyObject *)self;
}

static DEALLOC(loan)
{
	loan_drop(self);
	Py_XDECREF(self->id);
	Py_XDECREF(self->view);
	Py_XDECREF(self->block);
	Py_DECREF((PyObject *)self->producer);
	object_free((PyObject *)self);
}

/* ---- the buffer ----------------------------------------------------------------------------- */

static GETBUFFER(loan)
{
	view->obj = NULL;
	if (self->state != LOAN_OPEN) {
		PyErr_SetString(PyExc_BufferError, "a loan has a buffer only inside its with block");
		return -1;
	}
	if (PyBuffer_FillInfo(view, (PyObject *)self, shmq_loan_data(self->handle),
	                      (Py_ssize_t)self->length, 0, flags) < 0)
		return -1;
	self->exports++;
	return 0;
}

static RELEASEBUFFER(loan)
{
	(void)view;
	if (--self->exports == 0 && self->state == LOAN_OVER)
		loan_drop(self);
}

/* ---- with ----------------------------------------------------------------------------------- */

static int loan_clear(shmq_loan *handle, uint64_t length)
{
	memset(shmq_loan_data(handle), 0, length);
	return SHMQ_OK;
}

static NOARGS_METHOD(loan, __enter__)
{
	producer_object *producer = self->producer;
	attempt a = {.timeout = self->timeout};
	shmq_body block = {0};
	PyObject *view;
	shmq_loan *handle;
	int status;

	if (self->block)
		block = (shmq_body){PyBytes_AsString(self->block), (uint64_t)PyBytes_Size(self->block)};
	if (self->state != LOAN_NEW)
		return PyErr_Format(PyExc_RuntimeError, "a loan can be entered once; ask for another");
	do {
		if (!producer_usable(producer))
			return NULL;
		CORE_CALL(producer->broker, status,
		          shmq_loan_begin_on(producer->handle, self->length, &block, until, &handle));
		if (status != SHMQ_OK && !producer_retry(producer, &a, status))
			return NULL;
	} while (status != SHMQ_OK);
	if (self->zero && self->length < SHMQ_LARGE)
		status = loan_clear(handle, self->length);
	else if (self->zero)
		CORE_WAIT(producer->broker, status, FOR_EVER, LOCK_SLICE_NS,
		          loan_clear(handle, self->length));
	producer->loans++;
	self->handle = handle;
	self->epoch = producer->epoch;
	self->state = LOAN_OPEN;
	view = PyMemoryView_FromObject((PyObject *)self);
	self->view = view ? PyWeakref_NewRef(view, NULL) : NULL;
	if (!self->view)
		Py_CLEAR(view); /* the loan is cancelled when it is freed */
	return view;
}

/* Release the block's buffer. Returns false if an array or a slice that was made of it lives. */
static bool loan_release(loan_object *self)
{
	PyObject *view = PyObject_CallNoArgs(self->view);
	PyObject *released = NULL;

	if (view && view != Py_None)
		released = PyObject_CallMethod(view, "release", NULL);
	PyErr_Clear(); /* BufferError: something uses the view; `exports` tells */
	Py_XDECREF(released);
	Py_XDECREF(view);
	return self->exports == 0;
}

static PyObject *loan_commit(loan_object *self)
{
	producer_object *producer = self->producer;
	int64_t due = due_after(self->defer);
	attempt a = {.timeout = self->timeout};
	shmq_loan *handle = self->handle;
	uint64_t id;
	int status;

	do {
		if (!producer_usable(producer))
			return NULL;
		CORE_CALL(producer->broker, status, shmq_loan_commit(handle, due, until, &id));
		if (status == SHMQ_FORKED)
			return raise_status(producer->state, status, "the loan is the parent process's",
			                    "publish to '%U'", producer->topic);
		if (status != SHMQ_OK && !producer_retry(producer, &a, status))
			return NULL;
	} while (status != SHMQ_OK);
	self->handle = NULL;
	loan_handle_free(producer, handle);
	self->id = id_str(id);
	return self->id ? Py_NewRef(Py_None) : NULL;
}

static EXIT_METHOD(loan)
{
	PyObject *result = NULL;
	bool failed = nargs > 0 && args[0] != Py_None, free;

	if (self->state != LOAN_OPEN)
		Py_RETURN_NONE;
	free = loan_release(self);
	self->state = LOAN_OVER; /* from here on the release of the last buffer cancels it */
	if (!free) {
		if (failed)
			Py_RETURN_NONE;
		return PyErr_Format(PyExc_BufferError,
		                    "publish to '%U': the loan was cancelled because its buffer is still "
		                    "in use after the with block; delete what was made of it (slices, "
		                    "numpy arrays) inside",
		                    self->producer->topic);
	}
	if (!failed)
		result = loan_commit(self);
	if (self->handle)
		loan_drop(self);
	return failed ? Py_NewRef(Py_None) : result;
}

static METHOD(loan, truncate, (U64, nbytes), )
{
	if (self->state != LOAN_OPEN)
		return PyErr_Format(PyExc_RuntimeError,
		                    "a loan can be truncated only inside its with block");
	if (!nbytes || nbytes > self->length)
		return PyErr_Format(self->producer->state->exceptions[-SHMQ_INVALID],
		                    "truncate a loan from '%U': nbytes must be from 1 to %llu, not %llu",
		                    self->producer->topic, (unsigned long long)self->length,
		                    (unsigned long long)nbytes);
	shmq_loan_truncate(self->handle, nbytes);
	Py_RETURN_NONE;
}

static PyMethodDef loan_methods[] = {
	METHOD_ROW(loan, Loan, truncate, FAST),
	METHOD_ROW(loan, Loan, __enter__, METH_NOARGS),
	METHOD_ROW(loan, Loan, __exit__, METH_FASTCALL),
	{NULL, NULL, 0, NULL},
};

static PyMemberDef loan_members[] = {
	MEMBER_ROW(loan, Loan, id, T_OBJECT, id),
	{NULL, 0, 0, 0, NULL},
};

static PyType_Slot loan_slots[] = {
	{Py_tp_doc, DOC_Loan},
	{Py_tp_dealloc, loan_dealloc},
	{Py_tp_methods, loan_methods},
	{Py_tp_members, loan_members},
	{Py_bf_getbuffer, loan_getbuffer},
	{Py_bf_releasebuffer, loan_releasebuffer},
	{0, NULL},
};

TYPE_SPEC(loan, Loan, Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE);
