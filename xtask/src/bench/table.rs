//! Series of measurements, and tables of them.

use serde_json::{Value, json};
use std::time::Instant;

/// Milliseconds since a moment.
pub fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Measurements of one thing.
#[derive(Debug, Clone, Default)]
pub struct Series(Vec<f64>);

impl Series {
    /// Adds one.
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The value that this share of all does not exceed (nearest rank). With fewer than a hundred, the 99th is the
    /// largest.
    fn rank(&self, share: f64) -> Option<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        #[expect(clippy::cast_sign_loss, clippy::cast_possible_truncation, reason = "between 0 and the length")]
        let at = (share * sorted.len() as f64).ceil() as usize;
        sorted.get(at.saturating_sub(1)).copied()
    }

    /// The median.
    pub fn median(&self) -> Option<f64> {
        self.rank(0.5)
    }

    /// The 99th percentile.
    pub fn p99(&self) -> Option<f64> {
        self.rank(0.99)
    }

    /// For JSON: the statistics and all values in the order they were taken.
    pub fn json(&self) -> Value {
        json!({ "n": self.len(), "median": self.median(), "p99": self.p99(), "min": self.rank(0.0), "max": self.rank(1.0), "all": self.0 })
    }
}

impl FromIterator<f64> for Series {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

/// A number with one digit after the point, two below ten; nothing for none.
pub fn number(value: Option<f64>) -> String {
    value.map_or_else(String::new, |v| if v.abs() < 10.0 { format!("{v:.2}") } else { format!("{v:.1}") })
}

/// How many times as much as another median.
pub fn ratio(of: &Series, to: Option<&Series>) -> String {
    let value = of.median().zip(to.and_then(Series::median)).map(|(of, to)| of / to);
    value.map_or_else(String::new, |v| format!("{v:.2}"))
}

/// Mebibytes.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Prints rows below a head; the first column to the left, numbers to the right.
pub fn print(head: &[&str], rows: &[Vec<String>]) {
    let width = |at: usize| {
        let cells = rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count());
        cells.chain([head[at].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &[&str]| {
        let padded = cells
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(at, (cell, width))| if at == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") });
        println!("{}", padded.collect::<Vec<_>>().join("  ").trim_end());
    };
    line(head);
    for row in rows {
        line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_measured_values() {
        let series: Series = (1..=200).map(f64::from).collect();
        assert_eq!(
            (series.median(), series.p99(), series.rank(0.0), series.rank(1.0)),
            (Some(100.0), Some(198.0), Some(1.0), Some(200.0))
        );
        let few: Series = [3.0, 1.0, 2.0].into_iter().collect();
        assert_eq!((few.median(), few.p99()), (Some(2.0), Some(3.0)));
        assert_eq!(Series::default().median(), None);
    }
}
