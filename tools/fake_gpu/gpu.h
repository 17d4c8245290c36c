/* What nccl.c uses of cuda.c. */

#include <pthread.h>
#include <stddef.h>

enum { ATEN, CUBLAS, TRITON, NCCL, N_KINDS };

#define LOCKED(...) { pthread_mutex_lock(&mutex); __VA_ARGS__; pthread_mutex_unlock(&mutex); }
extern pthread_mutex_t mutex;

extern int n_ranks;
int launch(int kind);        /* count a kernel */
int handle(void **h);        /* make an object that nobody looks into */
void finish_copies(void);    /* make those that are under way; only while LOCKED */
