package webhook

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"

	"golang.org/x/sync/semaphore"
)

// asked posts a body of a size, or one that does not say its size, and returns the answer's code.
func asked(to http.Handler, size int, says bool) int {
	r := httptest.NewRequest(http.MethodPost, Path, strings.NewReader(strings.Repeat("x", size)))
	if !says {
		r.ContentLength = -1
	}
	w := httptest.NewRecorder()
	to.ServeHTTP(w, r)
	return w.Code
}

func TestALongRequestIsNotRead(t *testing.T) {
	read := int64(0)
	to := bounded{http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		read = n
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
	}), semaphore.NewWeighted(bodiesMost)}
	for name, c := range map[string]struct {
		size int
		says bool
		code int
		read int64
	}{
		"a pod":                          {10 << 10, true, http.StatusOK, 10 << 10},
		"one that does not say its size": {10 << 10, false, http.StatusOK, 10 << 10},
		"the longest":                    {bodyMost, true, http.StatusOK, bodyMost},
		"a longer one":                   {bodyMost + 1, true, http.StatusRequestEntityTooLarge, 0},
		"a longer one that does not say": {2 * bodyMost, false, http.StatusBadRequest, bodyMost},
	} {
		read = 0
		if code := asked(to, c.size, c.says); code != c.code || read != c.read {
			t.Errorf("%s is answered by %d, read are %d bytes", name, code, read)
		}
	}
}

func TestOnlySoMuchIsReadAtATime(t *testing.T) {
	for name, c := range map[string]struct {
		size int
		says bool
		want int // how many at a time
	}{
		"short ones":                    {1, true, bodiesMost / bodyLeast},
		"long ones":                     {bodyMost, true, bodiesMost / bodyMost},
		"ones that do not say how long": {1, false, bodiesMost / bodyMost},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				end := make(chan struct{})
				answers := make(chan int, 2*c.want)
				to := bounded{http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-end }),
					semaphore.NewWeighted(bodiesMost)}
				for range 2 * c.want {
					go func() { answers <- asked(to, c.size, c.says) }()
				}
				codes := map[int]int{}
				for range c.want { // after roomWithin
					codes[<-answers]++
				}
				close(end)
				for range c.want {
					codes[<-answers]++
				}
				if codes[http.StatusServiceUnavailable] != c.want || codes[http.StatusOK] != c.want {
					t.Errorf("answered by %v, want %d at a time", codes, c.want)
				}
				if code := asked(to, c.size, c.says); code != http.StatusOK {
					t.Errorf("the next one is answered by %d", code)
				}
			})
		})
	}
}
